"""Anthropic's API: messages, and counts of their tokens."""
