"""Public value types: configuration, prompts, sampling params, completions, weight updates, capabilities."""
