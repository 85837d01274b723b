"""The peak memory of a process, as it reads it itself.

The kernel's figure for ended children (`ru_maxrss`) is that of the largest child, and no less than the memory of the
parent when it started them.
"""

PRINT_PEAK = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
"""Python code for the end of a program, which prints its peak memory in KiB."""
