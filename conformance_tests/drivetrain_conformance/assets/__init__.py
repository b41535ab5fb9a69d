"""Models, adapters and weights that cases work with, made on the spot."""
