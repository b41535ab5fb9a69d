"""Wrong engines, each of which the suite must catch."""
