// short_conv: ROWS rows of B, C and x -> C * the convolution of B * x over positions, of COLS channels. bcx bf16
// [ROWS][3][COLS], weight bf16 [TAPS][COLS], seen bf16 [TAPS - 1 + ROWS][COLS], fresh and out bf16 [ROWS][COLS].
//
// seen begins with the rows before, which it gets again for the next call; fresh is B * x, which goes to the history. Sums
// are f32, from the oldest row on, and rounded before the product with C, as transformers rounds.
#include "tile.h"

extern "C" void AIE_FN(short_conv)(const bfloat16 *__restrict bcx, const bfloat16 *__restrict weight,
                                   bfloat16 *__restrict seen, bfloat16 *__restrict fresh, bfloat16 *__restrict out) {
    constexpr unsigned L = lanes_for(COLS, BLOCK);
    static_assert(COLS % L == 0 && TAPS > 1);
    use_nearest_even();
    for (unsigned c = 0; c < COLS; c += L) {
        for (unsigned r = 0; r < ROWS; r++) {
            const bfloat16 *row = bcx + r * 3 * COLS + c;
            const aie::vector<bfloat16, L> now =
                aie::mul(aie::load_v<L>(row), aie::load_v<L>(row + 2 * COLS)).template to_vector<bfloat16>();
            aie::store_v(fresh + r * COLS + c, now);
            aie::store_v(seen + (r + TAPS - 1) * COLS + c, now);
            aie::accum<accfloat, L> sum = aie::mul(aie::load_v<L>(seen + r * COLS + c), aie::load_v<L>(weight + c));
            unrolled<TAPS - 2>([&](auto t) {
                const unsigned at = (t + 1) * COLS + c;
                sum = aie::mac(sum, aie::load_v<L>(seen + r * COLS + at), aie::load_v<L>(weight + at));
            });
            sum = aie::mac(sum, now, aie::load_v<L>(weight + (TAPS - 1) * COLS + c));
            const aie::vector<bfloat16, L> mixed = sum.template to_vector<bfloat16>();
            aie::store_v(out + r * COLS + c, aie::mul(aie::load_v<L>(row + COLS), mixed).template to_vector<bfloat16>());
        }
        for (unsigned r = 0; r < TAPS - 1; r++)
            aie::store_v(seen + r * COLS + c, aie::load_v<L>(seen + (ROWS + r) * COLS + c));
    }
}
