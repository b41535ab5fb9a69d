"""The token-capture gateway: sessions for agents that speak OpenAI, and their token ids for the trainer."""
