// The products and the embedding lookup with weights in int8 (grouped.h): for each kernel of gemm.cc, gemv.cc and embed.cc
// one that is called int8_ and the same name.
#define FORMAT Int8
#define NAMED(kernel) int8_##kernel
#include "grouped_products.h"
