"""Helpers for engine adapters, first-party and third-party."""
