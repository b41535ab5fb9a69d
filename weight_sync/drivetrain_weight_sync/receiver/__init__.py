"""The engine's half of a weight update, and what backends need to know of models and adapters."""
