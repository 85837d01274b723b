// The same kernels as in attention.cc for a KV cache in 8 bits, called int8_rows_ and the same name.
#define FORMAT Int8Kv
#define NAMED(kernel) int8_rows_##kernel
#include "panels_attention.h"
