// Weights in groups as the array takes them (stages/weights/lanes.py has the order), read by the host: what it embeds
// tokens with, makes a prompt's logits of, and writes as blocks for the array's products of prompts. Included inside
// each instruction set, behind block_float.h.
//
// Panels of `lanes` outputs are cut into `chunks` of as many groups; the last may have groups behind the matrix. Where
// columns come in shares of so many `groups`, all panels of the first are followed by those of the next.
namespace ISA {
namespace {

constexpr int64_t group_inputs = LAYOUT_GROUP, most_lanes = LAYOUT_LANES, edge = LAYOUT_BLOCK;
static_assert(edge * sizeof(bf16) == 16, "a row of a block is half of the smallest vector");

template <int Bits, int Factors>
struct Lanes {
    static constexpr int zero = Bits == 6 ? 32 : 0;
    int64_t lanes, groups, chunk_groups, scale_bytes, number_bytes, scales_at, numbers_at, chunk_bytes, panel_bytes;

    Lanes(int64_t cols, int64_t lanes, int64_t chunks)
        : Lanes(lanes, groups_of(cols), chunks, (groups_of(cols) + chunks - 1) / chunks) {}

    Lanes(int64_t lanes, int64_t groups, int64_t chunks, int64_t chunk_groups)
        : lanes(lanes),
          groups(groups),
          chunk_groups(chunk_groups),
          scale_bytes((Factors ? Factors : 2) * lanes),
          number_bytes(group_inputs * lanes * Bits / 8),
          scales_at(lines(4 * Factors * lanes)),
          numbers_at(scales_at + lines(chunk_groups * scale_bytes)),
          chunk_bytes(numbers_at + lines(chunk_groups * number_bytes)),
          panel_bytes(chunks * chunk_bytes) {}

    // Of a group of a panel: out f32 [GROUP][lanes].
    void widen(const uint8_t *panel, int64_t group, float *out) const {
        const uint8_t *chunk = panel + group / chunk_groups * chunk_bytes;
        const uint8_t *scales = chunk + scales_at + group % chunk_groups * scale_bytes;
        alignas(64) float scale[most_lanes], least[most_lanes] = {};
        alignas(64) int8_t numbers[group_inputs * most_lanes];
        for (int64_t lane = 0; lane < lanes; lane++) scale[lane] = scale_of(chunk, scales, lane);
        if (Factors == 2)
            for (int64_t lane = 0; lane < lanes; lane++)
                least[lane] = scales[lanes + lane] * factor(chunk, lanes + lane);
        unpack(chunk + numbers_at + group % chunk_groups * number_bytes, numbers);
        for (int64_t k = 0; k < group_inputs; k++)
            for (int64_t lane = 0; lane < lanes; lane++)
                out[k * lanes + lane] = scale[lane] * static_cast<float>(numbers[k * lanes + lane]) - least[lane];
    }

    static int64_t groups_of(int64_t cols) { return (cols + group_inputs - 1) / group_inputs; }

private:
    static int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

    INLINE float factor(const uint8_t *chunk, int64_t which) {
        float value;
        memcpy(&value, chunk + 4 * which, sizeof value);
        return value;
    }

    INLINE float scale_of(const uint8_t *chunk, const uint8_t *scales, int64_t lane) {
        if (Factors) return scales[lane] * factor(chunk, lane);
        uint16_t bits;
        memcpy(&bits, scales + 2 * lane, sizeof bits);
        return f16_to_float(bits);
    }

    // With their sign, as rows [GROUP][lanes].
    void unpack(const uint8_t *packed, int8_t *out) const {
        alignas(64) int8_t blocks[group_inputs * most_lanes];
        const int64_t count = group_inputs * lanes;
        if (Bits == 8) {
            memcpy(blocks, packed, count);
        } else {
            for (int64_t i = 0; i < count / 2; i++) {
                blocks[2 * i] = static_cast<int8_t>(packed[i] & 15);
                blocks[2 * i + 1] = static_cast<int8_t>(packed[i] >> 4);
            }
        }
        if (Bits == 6) add_upper(packed + count / 2, blocks);
        const int8_t *row = blocks;
        for (int64_t k = 0; k < group_inputs; k += edge)
            for (int64_t lane = 0; lane < lanes; lane += edge)
                for (int64_t r = 0; r < edge; r++, row += edge) memcpy(out + (k + r) * lanes + lane, row, edge);
    }

    // Two bits of each number of a block, and above them those of the next block.
    void add_upper(const uint8_t *packed, int8_t *out) const {
        constexpr int64_t block = edge * edge;
        for (int64_t first = 0; first < group_inputs * lanes; first += 2 * block, packed += block / 2)
            for (int64_t i = 0; i < block; i++) {
                const int both = packed[i / 2] >> i % 2 * 4;
                int8_t *number = out + first + i;
                number[0] = static_cast<int8_t>((number[0] | (both & 3) << 4) - zero);
                number[block] = static_cast<int8_t>((number[block] | (both >> 2 & 3) << 4) - zero);
            }
    }
};

// A matrix in 8x8 blocks of bf16 [rows/8][cols/8][8 inputs][8 outputs].
struct Blocks {
    bf16 *out;
    int64_t cols;

    // Block `row`, `column` and those of the next outputs, `apart` from one another, of values f32 [8][stride].
    INLINE_MEMBER void put(int64_t row, int64_t column, int64_t apart, const float *values, int64_t stride,
                           int64_t outputs) const {
        alignas(64) bf16 rounded[most_lanes];
        for (int64_t k = 0; k < edge; k++) {
            for (int64_t l = 0; l < outputs; l += lanes) store_bf16(rounded + l, load<f32v>(values + k * stride + l));
            for (int64_t l = 0; l < outputs; l += edge) {
                const int64_t block = (row + l / edge * apart) * (cols / edge) + column;
                memcpy(out + (block * edge + k) * edge, rounded + l, edge * sizeof(bf16));
            }
        }
    }
};

// The same in block floating point.
struct FloatBlocks {
    int8_t *out;
    int64_t cols;

    INLINE_MEMBER void put(int64_t row, int64_t column, int64_t apart, const float *values, int64_t stride,
                           int64_t outputs) const {
        uint8_t rows[most_lanes * row_bytes];
        for (int64_t l = 0; l < outputs; l += lanes) to_block_float(values + l, stride, rows + l * row_bytes);
        for (int64_t l = 0; l < outputs; l += edge)
            memcpy(block_float_at(out, cols, row + l / edge * apart, column), rows + l * row_bytes, block_bytes);
    }
};

// Of a share of columns, which has so many `panels`: every `step`th, from panel `start` on. The first eight outputs become
// block `to` of `out`, the next are `apart` from them.
struct Taken {
    int64_t start, step, panels, to, apart;
};

template <class Format, class Result>
static void unpack_panels(const Format &format, const uint8_t *weight, const Result &out, int64_t out_cols,
                          const Taken &taken, Worker &worker) {
    const int64_t groups = Format::groups_of(out.cols), panels = (out_cols + format.lanes - 1) / format.lanes;
    alignas(64) float values[group_inputs * most_lanes];
    Chunks chunks(worker, panels * groups, 16);
    for (int64_t at, end; chunks.next(at, end);)
        for (; at < end; at++) {
            const int64_t panel = at / groups, group = at % groups, first = group * group_inputs;
            const int64_t place = group / format.groups * taken.panels + taken.start + panel * taken.step;
            format.widen(weight + place * format.panel_bytes, group % format.groups, values);
            const int64_t row = taken.to + panel * format.lanes / edge * taken.apart;
            const int64_t rest = out_cols - panel * format.lanes, outputs = rest < format.lanes ? rest : format.lanes;
            for (int64_t k = 0; k < group_inputs && first + k < out.cols; k += edge)
                out.put(row, (first + k) / edge, taken.apart, values + k * format.lanes, format.lanes, outputs);
        }
}

// Rows of tokens, zeros for one outside of the vocabulary.
template <class Format>
static void embed_lanes(const Format &format, const int32_t *tokens, const uint8_t *table, bf16 *out, int64_t rows,
                        int64_t cols, int64_t vocab, float scale, Worker &worker) {
    alignas(64) float values[group_inputs * most_lanes], row[group_inputs];
    Chunks chunks(worker, rows * format.groups, 16);
    for (int64_t at, end; chunks.next(at, end);)
        for (; at < end; at++) {
            const int64_t token = tokens[at / format.groups], first = at % format.groups * group_inputs;
            const bool known = token >= 0 && token < vocab;
            if (known) format.widen(table + token / format.lanes * format.panel_bytes, at % format.groups, values);
            for (int64_t k = 0; k < group_inputs; k++)
                row[k] = known ? values[k * format.lanes + token % format.lanes] : 0.0f;
            const int64_t inputs = cols - first < group_inputs ? cols - first : group_inputs;
            for (int64_t k = 0; k < inputs; k += lanes)
                store_bf16(out + at / format.groups * cols + first + k, load<f32v>(row + k), inputs - k);
            scale_row(out + at / format.groups * cols + first, inputs, scale);
        }
}

// out f32 [out_cols] = weight . x.
template <class Format>
static void dot_lanes(const Format &format, const uint8_t *weight, const bf16 *x, float *out, int64_t out_cols,
                      int64_t cols, Worker &worker) {
    alignas(64) float values[group_inputs * most_lanes];
    Chunks chunks(worker, (out_cols + format.lanes - 1) / format.lanes, 16, 1);
    for (int64_t panel, end; chunks.next(panel, end);)
        for (; panel < end; panel++) {
            alignas(64) float sum[most_lanes] = {};
            for (int64_t group = 0; group < format.groups; group++) {
                format.widen(weight + panel * format.panel_bytes, group, values);
                for (int64_t k = 0; k < group_inputs && group * group_inputs + k < cols; k++) {
                    const float with = to_float(x[group * group_inputs + k]);
                    for (int64_t l = 0; l < format.lanes; l++) sum[l] += with * values[k * format.lanes + l];
                }
            }
            const int64_t rows = out_cols - panel * format.lanes;
            memcpy(out + panel * format.lanes, sum, (rows < format.lanes ? rows : format.lanes) * sizeof(float));
        }
}

}  // namespace
}  // namespace ISA
