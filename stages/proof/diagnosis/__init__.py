"""Where a run goes wrong: each launch against its reference on its own inputs, each layer against another program's.

`sites.py` says which launches the calls of a plan make, `record.py` takes from a trace what each of them read and
wrote, `bounds.py` says how far a right launch may be from its reference, `launches.py` judges, `layers.py` compares
layers.
"""
