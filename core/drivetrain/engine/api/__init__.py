"""The calls of ``InferenceEngine``, by topic. Each call is documented here and done by one of the engine's parts."""
