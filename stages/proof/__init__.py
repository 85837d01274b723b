"""Showing that a build is right: comparisons with other engines, diagnosis, and the selftest of an NPU."""
