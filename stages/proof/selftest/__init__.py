"""The bring-up ladder: what an NPU that nobody has run yet must show, rung by rung, and what is measured on the way.

`probes` are small programs, built like a model's (`build`, `graph`) into an artifact directory of their own. `ladder`
climbs on a machine that has the device, needs no compiler, and stops at the first rung that breaks; `faults` says what
that means. `measure` makes the estimate's constants of the times. `report` is what a user attaches to a bug report.
"""
