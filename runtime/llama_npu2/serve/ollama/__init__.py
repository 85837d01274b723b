"""The endpoints of Ollama's API."""
