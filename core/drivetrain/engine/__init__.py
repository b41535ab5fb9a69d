"""The engine that a trainer uses: ``InferenceEngine``, its calls by topic (``api``), and the parts behind them."""
