// The kernels of experts with weights in int4 and x in 8 bits (byte_rows.h): for each kernel of moe.cc one that is called int4_a8_
// and the same name.
#define FORMAT A8<Int4>
#define NAMED(kernel) int4_a8_##kernel
#include "grouped_moe.h"
