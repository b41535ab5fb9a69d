"""The engine's half of a weight update, with facts about models and adapters for backends."""
