// Attention over a KV cache in panels, and what appends to it: the kernels of panels_attention.h in bf16.
#define FORMAT Bf16Kv
#define NAMED(kernel) kernel
#include "panels_attention.h"
