"""Text handling: the tokenizer, chat templates and text stop conditions."""
