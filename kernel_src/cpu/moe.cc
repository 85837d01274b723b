// The kernels of experts (moe_kernels.h) with weights in bf16.
#include "vec.h"
#include "epilogue.h"
#include "operand.h"
#include "tile.h"
#include "gemm_core.h"
#include "streams.h"
#include "gemv_core.h"
#include "pairs.h"
#include "experts.h"
#include "expert_gemv.h"
#include "expert_gemm.h"

namespace ISA {

using Stored = bf16;
using Vector = PlainVector;

template <class Epilogue>
using Product = Gemm<Epilogue>;

}  // namespace ISA

#define NAMED(kernel) kernel
#include "moe_kernels.h"
