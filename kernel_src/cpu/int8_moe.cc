// The kernels of experts with weights in int8 (grouped.h): for each kernel of moe.cc one that is called int8_ and the same name.
#define FORMAT Int8
#define NAMED(kernel) int8_##kernel
#include "grouped_moe.h"
