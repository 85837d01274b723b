// Rows of V into a KV cache in 8 bits (int8_rows.h): x bf16 [ROWS][HEADS * HEAD_DIM], out i8 [ROWS][HEADS][ROW_BYTES].
#include "int8_rows.h"

extern "C" void AIE_FN(append_v)(const bfloat16 *__restrict x, int8 *__restrict out) {
    use_nearest_even();
    for (unsigned head = 0; head < ROWS * HEADS; ++head) put_value(x + head * HEAD_DIM, out + head * ROW_BYTES);
}
