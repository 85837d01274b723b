"""Find where a run goes wrong: compare each launch with its reference, and each layer with another program's.

`diagnose.py` runs a text, compares, and looks inside a fused launch. `ops.py` lists the launches of a plan's calls,
`record.py` takes from a trace what each of them read and wrote, `bounds.py` says how far a right launch may be from its
reference, `launches.py` compares launches, and `report.py` compares layers and is the result.
"""
