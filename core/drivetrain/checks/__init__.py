"""Checks of single values, and how errors word what was wrong. Imports nothing but the errors."""
