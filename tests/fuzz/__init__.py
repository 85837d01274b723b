"""Parsers fed with damaged files: each input runs, or ends in one line. `python -m tests.fuzz.run --help`."""
