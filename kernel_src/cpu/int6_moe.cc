// The kernels of experts with weights in int6 (grouped.h): for each kernel of moe.cc one that is called int6_ and the same name.
#define FORMAT Int6
#define NAMED(kernel) int6_##kernel
#include "grouped_moe.h"
