"""Wrong backends that are drawn at random, so that the share of them that the suite catches measures the suite."""
