"""What a trainer author reads: ``InferenceEngine``, and the parts that it is made of."""
