// Block floating point as the array takes it (stages/weights/formats/bfp16.py): eight inputs of an output share an
// exponent. Included inside each instruction set, behind vec.h.
namespace ISA {
namespace {

constexpr int64_t block_inputs = LAYOUT_BLOCK, row_bytes = 1 + block_inputs, block_bytes = block_inputs * row_bytes;
static_assert(block_inputs == 8, "mantissas of a row are two words");

// Of the smallest blocks: 2^(133 - exponent) is a number.
constexpr uint32_t lowest_exponent = 8;

// What rounds to whole numbers, which are then in the lowest bits: 3 * 2^22.
constexpr float whole = 12582912.0f;

INLINE u32v larger(u32v a, u32v b) {
    const u32v which = (u32v)(a > b);
    return (a & which) | (b & ~which);
}

// Of `lanes` outputs: values f32 [8 inputs][stride], rounded to bf16 before, -> rows [lanes][9 bytes].
INLINE void to_block_float(const float *values, int64_t stride, uint8_t *rows) {
    f32v input[block_inputs];
    u32v largest = {};
    for (int64_t k = 0; k < block_inputs; k++) {
        input[k] = to_float(to_bf16(load<f32v>(values + k * stride)));
        largest = larger((u32v)input[k] & 0x7fffffffu, largest);
    }
    u32v exponent = larger(largest >> 23, lowest_exponent + u32v{});
    const u32v rounded = (u32v)((f32v)largest * (f32v)((260 - exponent) << 23) + whole);
    exponent += rounded >> 7 & 1;
    const f32v scale = (f32v)((260 - exponent) << 23);
    u32v words[2] = {};
    for (int64_t k = 0; k < block_inputs; k++)
        words[k / 4] |= ((u32v)(input[k] * scale + whole) & 0xff) << (k % 4 * 8);
    for (int64_t lane = 0; lane < lanes; lane++, rows += row_bytes) {
        const uint32_t mantissas[2] = {words[0][lane], words[1][lane]};
        rows[0] = static_cast<uint8_t>(exponent[lane]);
        memcpy(rows + 1, mantissas, sizeof mantissas);
    }
}

// A matrix of blocks of eight outputs, those of two times eight in turn: block `row`, `column`.
INLINE uint8_t *block_float_at(int8_t *out, int64_t cols, int64_t row, int64_t column) {
    const int64_t block = (row / 2 * (cols / block_inputs) + column) * 2 + row % 2;
    return reinterpret_cast<uint8_t *>(out) + block * block_bytes;
}

}  // namespace
}  // namespace ISA
