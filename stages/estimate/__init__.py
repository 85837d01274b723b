"""What a program costs on the NPU: what its launches do, priced by one table of the machine's rates.

`constants.py` is the table, `work.py` the arithmetic of time, `flow.py` reads the work of a launch from its operations,
`price.py` adds up a program, `systems.py` holds other projects' plans with what they measured. Knows no targets.
"""
