// A token's [Q | K | V], x [(HEADS + 2 * KV_HEADS) * HEAD_DIM]: Q rotated (rope.h) where it is, the position behind it, and
// the token's row of an interleaved cache, K rotated: kv [KV_HEADS][K | V][HEAD_DIM]. table f32 [HEAD_DIM], and behind it
// the position, i32.
#include "rope.h"

constexpr unsigned POSITION = LAYOUT_POSITION;
static_assert(POSITION == 32, "a vector of bf16");

extern "C" void AIE_FN(rope_qkv)(bfloat16 *x, const float *table, bfloat16 *kv) {
    use_nearest_even();
    rotate_heads<HEADS, HEAD_DIM>(x, table, x);
    bfloat16 *behind = x + HEADS * HEAD_DIM;
    const bfloat16 *v = behind + KV_HEADS * HEAD_DIM;
    rotate_heads<KV_HEADS, 2 * HEAD_DIM>(behind, table, kv);
    for (unsigned head = 0; head < KV_HEADS; ++head, v += HEAD_DIM, kv += 2 * HEAD_DIM)
        for (unsigned d = 0; d < HEAD_DIM; d += L) aie::store_v(kv + HEAD_DIM + d, aie::load_v<L>(v + d));
    aie::store_v(behind, aie::zeros<bfloat16, POSITION>());
    *reinterpret_cast<int32 *>(behind) = *reinterpret_cast<const int32 *>(table + HEAD_DIM);
}
