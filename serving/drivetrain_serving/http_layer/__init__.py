"""The HTTP layer that all routes share: bodies, answers, keys."""
