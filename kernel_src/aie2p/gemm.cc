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

aie::accum<accfloat, BLOCK> load_block(const float *c) {
    aie::accum<accfloat, BLOCK> out;
    for (unsigned half = 0; half < 2; ++half)
        out.insert(half, aie::accum<accfloat, HALF>(aie::load_v<HALF>(c + half * HALF)));
    return out;
}

void store_block(float *c, const aie::accum<accfloat, BLOCK> &value) {
    for (unsigned half = 0; half < 2; ++half)
        aie::store_v(c + half * HALF, value.template extract<HALF>(half).template to_vector<float>());
}

// HIGH x WIDE blocks of c, over all of TK.
void multiply(const bfloat16 *a, const bfloat16 *b, float *c) {
    Block sum[HIGH][WIDE];
    for (unsigned i = 0; i < HIGH; ++i)
        for (unsigned j = 0; j < WIDE; ++j) sum[i][j] = Block(load_block(c + (i * COLS + j) * BLOCK));
    for (unsigned k = 0; k < DEPTH; ++k)
        for (unsigned i = 0; i < HIGH; ++i)
            for (unsigned j = 0; j < WIDE; ++j)
                sum[i][j].mac(aie::load_v<BLOCK>(a + (i * DEPTH + k) * BLOCK),
                              aie::load_v<BLOCK>(b + (j * DEPTH + k) * BLOCK));
    for (unsigned i = 0; i < HIGH; ++i)
        for (unsigned j = 0; j < WIDE; ++j) store_block(c + (i * COLS + j) * BLOCK, sum[i][j].to_accum());
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
