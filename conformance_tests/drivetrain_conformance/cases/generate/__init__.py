"""Generation basics, which every engine supports whatever it claims."""
