"""Many sequences on one set of weights: whose blocks hold what, and which rows come in the next step."""
