"""Values in and out: configuration, prompts, sampling params, completions, weight updates, capabilities."""
