"""Show that a build is right.

`comparison` compares with other engines, `diagnosis` finds the launch that is wrong, and `selftest` brings up an NPU.
"""
