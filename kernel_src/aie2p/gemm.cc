// One tile of c += a @ b with f32 accumulators, in 8x8 blocks (each block contiguous, row-major).
// a bf16 [TM/8][TK/8][8][8], b bf16 [TN/8][TK/8][8 k][8 n].
// BFP: b in block floating point, [TN/16][TK/8][2][8 n][9 bytes] (stages/weights/formats/bfp16.py), the rows of TN/16
// whole lines, and a is converted to it: the matrix unit multiplies that several times faster.
// c is raw storage of TM*TN f32 in blocks [TM/8][TN/8][8][8]; after gemm_out its first part holds them as bf16, with
// SWIGLU SwiGLU of each two blocks beside each other, a gate and what it is for.
// FEWER_ACCUMULATORS: half as many sums in registers, which leaves room for the state of b's stream.
#ifndef BFP
#define BFP 0
#endif
#ifndef SWIGLU
#define SWIGLU 0
#endif
#ifndef FEWER_ACCUMULATORS
#define FEWER_ACCUMULATORS 0
#endif
#if SWIGLU
#include "silu.h"
#endif
#include "tile.h"

namespace {

constexpr unsigned ROWS = TM / EDGE, COLS = TN / EDGE, DEPTH = TK / EDGE;
static_assert(TM % EDGE == 0 && TN % EDGE == 0 && TK % EDGE == 0);
static_assert(EDGE == 8, "the matrix unit multiplies blocks of 8 x 8 bf16");
// Blocks of c held in accumulator registers at once.
constexpr unsigned HIGH = ROWS % 2 == 0 && !FEWER_ACCUMULATORS ? 2 : 1, WIDE = COLS % 2 == 0 ? 2 : 1;

#if BFP
static_assert(COLS % 2 == 0, "a stream of b has the blocks of two columns in turn");
using Weight = int8;
using Block = aie::mmul<EDGE, EDGE, EDGE, bfp16ebs8, bfp16ebs8>;

// From one column of b to the next: half of the lines of two.
constexpr unsigned COLUMN = (DEPTH * 2 * BLOCK * 9 / 8 + 63) / 64 * 32;

// A core converts what it loads once for all columns that it multiplies it with at a time.
inline aie::block_vector<bfp16ebs8, BLOCK> converted(const bfloat16 *a) {
    return aie::accum<accfloat, BLOCK>(aie::load_v<BLOCK>(a)).template to_vector<bfp16ebs8>();
}

inline void add_products(Registers<Block, HIGH * WIDE> &sum, const bfloat16 *a, const Weight *b) {
    aie::block_vector_input_buffer_stream<bfp16ebs8, BLOCK> columns(reinterpret_cast<const bfp16ebs8 *>(b));
    for (unsigned k = 0; k < DEPTH; ++k, a += BLOCK) {
        const auto first = columns.pop(), second = columns.pop();
        unrolled<HIGH>([&](auto row) {
            const aie::block_vector<bfp16ebs8, BLOCK> left = converted(a + row * DEPTH * BLOCK);
            sum.get(std::integral_constant<unsigned, row * WIDE>()).mac(left, aie::op_transpose(first));
            sum.get(std::integral_constant<unsigned, row * WIDE + 1>()).mac(left, aie::op_transpose(second));
        });
    }
}
#else
using Weight = bfloat16;
using Block = aie::mmul<EDGE, EDGE, EDGE, bfloat16, bfloat16>;

constexpr unsigned COLUMN = DEPTH * BLOCK;

inline void add_products(Registers<Block, HIGH * WIDE> &sum, const bfloat16 *a, const Weight *b) {
    for (unsigned k = 0; k < DEPTH; ++k, a += BLOCK, b += BLOCK)
        unrolled<HIGH * WIDE>([&](auto n) {
            sum.get(n).mac(aie::load_v<BLOCK>(a + n / WIDE * DEPTH * BLOCK),
                           aie::load_v<BLOCK>(b + n % WIDE * COLUMN));
        });
}
#endif

// HIGH x WIDE blocks of c, over all of TK.
void multiply(const bfloat16 *a, const Weight *b, float *c) {
    constexpr auto place = [](unsigned n) { return (n / WIDE * COLS + n % WIDE) * BLOCK; };
    Registers<Block, HIGH * WIDE> sum;
    unrolled<HIGH * WIDE>([&](auto n) { sum.get(n) = Block(load_block(c + place(n))); });
    add_products(sum, a, b);
    unrolled<HIGH * WIDE>([&](auto n) { store_block(c + place(n), sum.get(n).to_accum()); });
}

}  // namespace

extern "C" void AIE_FN(gemm_zero)(float *__restrict c) {
    for (unsigned i = 0; i < TM * TN; i += HALF) aie::store_v(c + i, aie::zeros<float, HALF>());
}

extern "C" void AIE_FN(gemm_step)(const bfloat16 *__restrict a, const Weight *__restrict b, float *__restrict c) {
    use_nearest_even();
    for (unsigned i = 0; i < ROWS; i += HIGH)
        for (unsigned j = 0; j < COLS; j += WIDE)
            multiply(a + i * DEPTH * BLOCK, b + j * COLUMN, c + (i * COLS + j) * BLOCK);
}

// Front to back: a bf16 never lands on an f32 that is still to be read.
extern "C" void AIE_FN(gemm_out)(float *__restrict c) {
    use_nearest_even();
    bfloat16 *out = reinterpret_cast<bfloat16 *>(c);
    for (unsigned i = 0; i < TM * TN; i += BLOCK)
        aie::store_v(out + i, load_block(c + i).template to_vector<bfloat16>());
#if SWIGLU
    for (unsigned i = 0; i < TM * TN; i += 2 * BLOCK) silu_times<BLOCK>(out + i, out + i + BLOCK, out + i / 2);
#endif
}
