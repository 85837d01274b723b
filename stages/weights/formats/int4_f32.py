"""int4_f32: 6 bits per weight, `w = s q - m`, each operation rounded to f32.

32 weights with numbers q from 0 to 15 share a scale s and a minimum m, f32. The format is for checkpoints: it holds the
values of GGUF's Q4_0, Q4_1 and Q4_K, of AWQ and of 4-bit GPTQ exactly.
"""

from __future__ import annotations

from stages.weights.grouped import NIBBLES, Grouped, exact_format

GROUPED = Grouped(factors=0, scale_values=2, scale_type="float32", numbers=NIBBLES)
FORMAT = exact_format("int4_f32", GROUPED, least=0, most=15)
