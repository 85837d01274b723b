"""Text to tokens and back: the tokenizer, and chat templates in a process of their own."""
