"""The route cases: each group is a module."""
