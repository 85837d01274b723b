"""The bring-up ladder: the checks that an NPU must pass at its first run, rung by rung.

It also measures on the way.

`probes` are small programs, built like a model's (`build`, `graph`) into an artifact directory of their own. `ladder`
runs on a machine that has the device, needs no compiler, and stops at the first rung that breaks; `faults` explains it.
`measure` computes the estimate's constants from the times. `report` is what a user attaches to a bug report.
"""
