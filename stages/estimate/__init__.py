"""Estimates the time of a program on the NPU: the work of its launches, priced by one table of the machine's rates.

`constants.py` is the table, `work.py` the arithmetic of time. `flow.py` derives the work of a launch from its
operations, `price.py` adds up a program, `phases.py` a manifest's phases. `ranges.py` says how far a time may be off.
`systems.py` models other projects' plans, to compare the estimate with their measurements in `systems.toml`. Knows no
targets.
"""
