"""How tensors are laid out in buckets, copied on a device, and digested."""
