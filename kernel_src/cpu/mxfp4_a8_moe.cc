// The kernels of experts with weights in mxfp4 and x in 8 bits (byte_rows.h): for each kernel of moe.cc one that is called mxfp4_a8_
// and the same name.
#define FORMAT A8<Mxfp4>
#define NAMED(kernel) mxfp4_a8_##kernel
#include "grouped_moe.h"
