// What the host does with weights in int4 that lie as the array takes them: int4_unpack,
// int4_unpack_paired, int4_unpack_shared_pairs, int4_unpack_shared, all also as _bfp16, int4_embed_rows, int4_gemv_rows_f32.
#define BITS 4
#define FACTORS 2
#define NAMED(kernel) int4_##kernel
#include "lanes_kernels.h"
