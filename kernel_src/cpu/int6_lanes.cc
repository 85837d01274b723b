// What the host does with weights in int6 that lie as the array takes them: int6_unpack,
// int6_unpack_paired, int6_unpack_shared_pairs, int6_unpack_shared, all also as _bfp16, int6_embed_rows, int6_gemv_rows_f32.
#define BITS 6
#define FACTORS 1
#define NAMED(kernel) int6_##kernel
#include "lanes_kernels.h"
