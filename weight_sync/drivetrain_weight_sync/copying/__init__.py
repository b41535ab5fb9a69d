"""Bucket layout, device copies, and digests of tensors."""
