"""Clients of engines' own servers, which somebody else launched."""
