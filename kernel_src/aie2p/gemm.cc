// One tile of c += a @ b with f32 accumulators, in 8x8 blocks (each block contiguous, row-major).
// a bf16 [TM/8][TK/8][8][8], b bf16 [TN/8][TK/8][8 k][8 n].
// c is raw storage of TM*TN f32 in blocks [TM/8][TN/8][8][8]; after gemm_out its first half holds them as bf16.
// BFP: products in block floating point, eight values to an exponent, which the matrix unit does several times faster.
#if BFP
#define AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16 1
#endif
#include "tile.h"

namespace {

constexpr unsigned ROWS = TM / EDGE, COLS = TN / EDGE, DEPTH = TK / EDGE;
static_assert(TM % EDGE == 0 && TN % EDGE == 0 && TK % EDGE == 0);
static_assert(EDGE == 8, "the matrix unit multiplies blocks of 8 x 8 bf16");
// Blocks of c held in accumulator registers at once.
constexpr unsigned HIGH = ROWS % 2 == 0 ? 2 : 1, WIDE = COLS % 2 == 0 ? 2 : 1;

using Block = aie::mmul<EDGE, EDGE, EDGE, bfloat16, bfloat16>;

// HIGH x WIDE blocks of c, over all of TK.
void multiply(const bfloat16 *a, const bfloat16 *b, float *c) {
    constexpr auto place = [](unsigned n) { return (n / WIDE * COLS + n % WIDE) * BLOCK; };
    Registers<Block, HIGH * WIDE> sum;
    unrolled<HIGH * WIDE>([&](auto n) { sum.get(n) = Block(load_block(c + place(n))); });
    for (unsigned k = 0; k < DEPTH; ++k, a += BLOCK, b += BLOCK)
        unrolled<HIGH * WIDE>([&](auto n) {
            sum.get(n).mac(aie::load_v<BLOCK>(a + n / WIDE * DEPTH * BLOCK),
                           aie::load_v<BLOCK>(b + n % WIDE * DEPTH * BLOCK));
        });
    unrolled<HIGH * WIDE>([&](auto n) { store_block(c + place(n), sum.get(n).to_accum()); });
}

}  // namespace

extern "C" void AIE_FN(gemm_zero)(float *c) {
    for (unsigned i = 0; i < TM * TN; i += HALF) aie::store_v(c + i, aie::zeros<float, HALF>());
}

extern "C" void AIE_FN(gemm_step)(const bfloat16 *a, const bfloat16 *b, float *c) {
    use_nearest_even();
    for (unsigned i = 0; i < ROWS; i += HIGH)
        for (unsigned j = 0; j < COLS; j += WIDE)
            multiply(a + i * DEPTH * BLOCK, b + j * DEPTH * BLOCK, c + (i * COLS + j) * BLOCK);
}

// Front to back: a bf16 never lands on an f32 that is still to be read.
extern "C" void AIE_FN(gemm_out)(float *c) {
    use_nearest_even();
    bfloat16 *out = reinterpret_cast<bfloat16 *>(c);
    for (unsigned i = 0; i < TM * TN; i += BLOCK)
        aie::store_v(out + i, load_block(c + i).template to_vector<bfloat16>());
}
