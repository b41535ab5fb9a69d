"""Independent computations that an engine's answers are compared with."""
