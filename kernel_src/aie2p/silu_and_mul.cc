// SwiGLU's activation (silu.h) of COUNT values.
#include "silu.h"

extern "C" void AIE_FN(silu_and_mul)(const bfloat16 *__restrict gate, const bfloat16 *__restrict up,
                                     bfloat16 *__restrict out) {
    constexpr unsigned L = lanes_for(COUNT, BLOCK);
    static_assert(COUNT % L == 0);
    use_nearest_even();
    for (unsigned i = 0; i < COUNT; i += L) silu_times<L>(gate + i, up + i, out + i);
}
