"""A model of an engine in plain Python, and random histories that are played on both."""
