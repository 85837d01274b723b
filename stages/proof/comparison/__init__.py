"""Compare artifacts with other engines: transformers, llama.cpp, and the files that they read.

`verification` and `continuations` check logits and tokens, `divergence` and `perplexity` measure quality, `rounded` has
a checkpoint's weights in each format, and `peers` runs other engines for the bench.
"""
