// Rotary embedding (rope.h) of ROWS rows. x, out [ROWS][HEADS * HEAD_DIM]; table f32 [ROWS][HEAD_DIM].
#include "rope.h"

extern "C" void AIE_FN(rope)(const bfloat16 *x, const float *table, bfloat16 *out) {
    use_nearest_even();
    for (unsigned row = 0; row < ROWS; ++row) {
        rotate_heads<HEADS, HEAD_DIM>(x, table, out);
        x += HEADS * HEAD_DIM, table += HEAD_DIM, out += HEADS * HEAD_DIM;
    }
}
