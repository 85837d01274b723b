"""Artifact directories: how they are described, checked, and read."""
