"""Generation basics, which every engine supports without a claim."""
