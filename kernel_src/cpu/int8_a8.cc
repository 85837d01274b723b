// The products with weights in int8 and x in 8 bits (byte_rows.h): for each kernel of gemm.cc and gemv.cc one that is called
// int8_a8_ and the same name.
#define FORMAT A8<Int8>
#define NAMED(kernel) int8_a8_##kernel
#include "byte_products.h"
