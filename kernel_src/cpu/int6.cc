// The products and the embedding lookup with weights in int6 (grouped.h): for each kernel of gemm.cc, gemv.cc and embed.cc
// one that is called int6_ and the same name.
#define FORMAT Int6
#define NAMED(kernel) int6_##kernel
#include "grouped_products.h"
