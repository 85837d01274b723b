// The kernels of experts with weights in w8a8 (grouped.h): for each kernel of moe.cc one that is called w8a8_ and the same name.
#define FORMAT W8A8
#define NAMED(kernel) w8a8_##kernel
#include "grouped_moe.h"
