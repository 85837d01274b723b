// The products with weights in int6 and x in 8 bits (byte_rows.h): for each kernel of gemm.cc and gemv.cc one that is called
// int6_a8_ and the same name.
#define FORMAT A8<Int6>
#define NAMED(kernel) int6_a8_##kernel
#include "byte_products.h"
