"""Helpers that tests of several files use."""
