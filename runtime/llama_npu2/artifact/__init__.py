"""Artifact directories: how one is described, checked, and read."""
