"""Assertions that several groups of cases share."""
