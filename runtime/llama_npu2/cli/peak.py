"""How much memory a process held at most, by its own account. What the kernel says of children that ended (`ru_maxrss`)
is of whichever was the largest, and no less than what their parent held when it started them."""

PRINT_PEAK = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
"""Python that prints it, in KiB, for the end of a program."""
