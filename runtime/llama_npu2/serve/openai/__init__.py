"""OpenAI's API: chat completions, completions, and the list of models."""
