"""Weights that a trainer broadcasts in a torch.distributed group of its own."""
