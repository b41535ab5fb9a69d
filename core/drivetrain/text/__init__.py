"""Text and token ids: the tokenizer, chat templates, stop conditions on text."""
