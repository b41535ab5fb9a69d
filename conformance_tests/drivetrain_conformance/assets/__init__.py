"""Models, adapters and weights for the cases, created when needed."""
