"""Checks of single values, and the wording of their errors. Imports only the errors."""
