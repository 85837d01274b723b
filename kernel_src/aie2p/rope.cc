// Rotary embedding (rope.h) of ROWS rows, x [ROWS][HEADS * HEAD_DIM]; table f32 [ROWS][HEAD_DIM], out like x. With PLACED
// rows of the table have their positions behind them, i32, and so has then each head of a row: table [ROWS][HEAD_DIM +
// POSITION / 2], out [ROWS][HEADS][HEAD_DIM + HEAD_POSITION]. NORM: each head is normed first (rms_norm.h), in place, with
// one weight [HEAD_DIM] for all. KV_BITS of 8: heads are rows of K of a KV cache in 8 bits (int8_rows.h), out i8
// [ROWS][HEADS][ROW_BYTES]; x is rotated in place.
#include "rope.h"
#if NORM
#include "rms_norm.h"
#endif
#if KV_BITS == 8
#include "int8_rows.h"
#endif

constexpr unsigned HEAD_POSITION = LAYOUT_HEAD_POSITION, POSITION = LAYOUT_POSITION;
static_assert(HEAD_POSITION == 8, "a vector of bf16, and a row of a block");
static_assert(POSITION == 32, "a vector of bf16");
#ifdef PLACED
constexpr unsigned WIDTH = HEAD_DIM + HEAD_POSITION, ANGLES = HEAD_DIM + POSITION / 2;
#else
constexpr unsigned WIDTH = HEAD_DIM, ANGLES = HEAD_DIM;
#endif

#if KV_BITS == 8
using Out = int8;
constexpr unsigned OUT = HEADS * ROW_BYTES;
#else
using Out = bfloat16;
constexpr unsigned OUT = HEADS * WIDTH;
#endif

#if NORM
extern "C" void AIE_FN(rope)(bfloat16 *__restrict x, const bfloat16 *__restrict weight, const float *__restrict table,
                             Out *__restrict out, float eps) {
#else
extern "C" void AIE_FN(rope)(bfloat16 *__restrict x, const float *__restrict table, Out *__restrict out) {
#endif
    use_nearest_even();
    for (unsigned row = 0; row < ROWS; ++row) {
#if NORM
        norm_rows<HEADS, HEAD_DIM>(x, weight, eps);
#endif
#if KV_BITS == 8
        rotate_heads<HEADS, WIDTH>(x, table, x);
        for (unsigned head = 0; head < HEADS; ++head) put_key(x + head * HEAD_DIM, out + head * ROW_BYTES);
#else
        rotate_heads<HEADS, WIDTH>(x, table, out);
#endif
#ifdef PLACED
        const auto position = aie::load_v<HEAD_POSITION>(reinterpret_cast<const bfloat16 *>(table + HEAD_DIM));
        for (unsigned head = 0; head < HEADS; ++head) aie::store_v(out + head * WIDTH + HEAD_DIM, position);
#endif
        x += HEADS * HEAD_DIM, table += ANGLES, out += OUT;
    }
}
