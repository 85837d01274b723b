// The kernels of experts with weights in int4 (grouped.h): for each kernel of moe.cc one that is called int4_ and the same name.
#define FORMAT Int4
#define NAMED(kernel) int4_##kernel
#include "grouped_moe.h"
