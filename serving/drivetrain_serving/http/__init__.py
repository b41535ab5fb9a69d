"""Parts of HTTP that all routes share: bodies, answers, keys."""
