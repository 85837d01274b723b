// The kernels of experts with weights in int8_f32 and x in 8 bits (byte_rows.h): for each kernel of moe.cc one that is called int8_f32_a8_
// and the same name.
#define FORMAT A8<Int8F32>
#define NAMED(kernel) int8_f32_a8_##kernel
#include "grouped_moe.h"
