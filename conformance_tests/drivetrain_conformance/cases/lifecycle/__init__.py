"""An engine's life: start, description, profile, saving, end, and nothing left behind."""
