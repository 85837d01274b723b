"""int8_f32: 10 bits per weight, `w = s q - m`, each operation rounded to f32.

32 weights with numbers q from -128 to 127 share a scale s and a minimum m, f32. The format is for checkpoints: it holds
the values of GGUF's Q5_K and of 8-bit GPTQ exactly.
"""

from __future__ import annotations

from stages.weights.grouped import BYTES, Grouped, exact_format

GROUPED = Grouped(factors=0, scale_values=2, scale_type="float32", numbers=BYTES)
FORMAT = exact_format("int8_f32", GROUPED, least=-128, most=127)
