// The kernels of experts with weights in int8_f32_16 (grouped.h): for each kernel of moe.cc one that is called int8_f32_16_ and the same name.
#define FORMAT Int8F32By16
#define NAMED(kernel) int8_f32_16_##kernel
#include "grouped_moe.h"
