// The kernels of experts with weights in mxfp4 (grouped.h): for each kernel of moe.cc one that is called mxfp4_ and the same name.
#define FORMAT Mxfp4
#define NAMED(kernel) mxfp4_##kernel
#include "grouped_moe.h"
