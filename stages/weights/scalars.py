"""Values of scalars that descriptions of models and kernels share."""

ACTIVATIONS = ("silu", "gelu_tanh", "swiglu_oai")
"""Names of activations. Kernels take their places here."""

ALL = 1 << 31
"""The least number of positions of attention's `sees` that leaves out nothing."""
