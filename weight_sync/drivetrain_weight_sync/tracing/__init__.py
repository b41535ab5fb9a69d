"""How an engine's own loader is followed once, so that its copies can be made again without it."""
