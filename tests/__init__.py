"""The tests. Products of numpy and torch take one thread each: threads of a library that wait for others spin, and the
workers of xdist have a CPU each."""

import os

os.environ |= dict.fromkeys(("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
