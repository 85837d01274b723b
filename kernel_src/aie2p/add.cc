// Residual add of COUNT values: out = a + b, bf16 in and out, one rounding.
#include "tile.h"

extern "C" void AIE_FN(add)(const bfloat16 *__restrict a, const bfloat16 *__restrict b, bfloat16 *__restrict out) {
    constexpr unsigned L = lanes_for(COUNT, 32);
    static_assert(COUNT % L == 0);
    use_nearest_even();
    for (unsigned i = 0; i < COUNT; i += L) {
        const aie::accum<accfloat, L> wide(aie::load_v<L>(a + i));
        aie::store_v(out + i, aie::add(wide, aie::load_v<L>(b + i)).template to_vector<bfloat16>());
    }
}
