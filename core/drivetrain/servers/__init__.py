"""Clients of engines' own HTTP servers, launched by somebody else."""
