// The kernels of experts with weights in int4_f32 (grouped.h): for each kernel of moe.cc one that is called int4_f32_ and the same name.
#define FORMAT Int4F32
#define NAMED(kernel) int4_f32_##kernel
#include "grouped_moe.h"
