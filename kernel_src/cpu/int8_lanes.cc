// What the host does with weights in int8 that lie as the array takes them: int8_unpack,
// int8_unpack_paired, int8_unpack_shared_pairs, int8_unpack_shared, all also as _bfp16, int8_embed_rows, int8_gemv_rows_f32.
#define BITS 8
#define FACTORS 0
#define NAMED(kernel) int8_##kernel
#include "lanes_kernels.h"
