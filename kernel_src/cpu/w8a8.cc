// The products and the embedding lookup with weights in w8a8 (w8a8.h): for each kernel of gemm.cc, gemv.cc and embed.cc
// one that is called w8a8_ and the same name.
#define FORMAT W8A8
#define NAMED(kernel) w8a8_##kernel
#include "grouped_products.h"
