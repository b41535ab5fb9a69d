"""Trace an engine's weight loader once, so that its copies can be replayed without it."""
