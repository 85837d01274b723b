// A KV cache in rows of 8 bits, as a source of blocks for AttentionTile (kv_cache.h): [position][head], each as Int8Head has
// it; blocks are packed when due. Included inside each instruction set.
namespace ISA {
namespace {

// Where a head's part of a position's row of 8 bits has what: K's numbers, K's scale, V's scale, V's numbers.
struct Int8Head {
    int64_t head_dim;
    int64_t bytes() const { return 2 * (head_dim + Int8Kv::row_elements); }
    int64_t k_scale() const { return head_dim; }
    int64_t v_scale() const { return head_dim + Int8Kv::row_elements; }
    int64_t v() const { return v_scale() + Int8Kv::row_elements; }
};

class Int8KvRows {
public:
    using Format = Int8Kv;
    using Tile = AttentionTile<Format>;

    Int8KvRows(const AttentionShape &shape, const int8_t *kv) : shape_(shape), kv_(kv) {}

    // Of an odd count, the last position's partner is 0: it is multiplied with 0.
    KvBlock<Format> take(Tile &tile, Place at, int64_t count, Place next) const {
        const KvBlock<Format> block = upcoming(tile, next);
        int8_t *const k = reinterpret_cast<int8_t *>(tile.k_scratch()), *const v = reinterpret_cast<int8_t *>(tile.v_scratch());
        const int64_t dim = shape_.head_dim;
        const Int8Head head = {dim};
        const int8_t *row = kv_ + (at.begin * shape_.kv_heads + at.head) * head.bytes();
        for (int64_t i = 0; i < count; i++, row += shape_.kv_heads * head.bytes()) {
            memcpy(k + i * Format::row_elements, row + head.k_scale(), Format::row_elements);
            memcpy(v + i * Format::row_elements, row + head.v_scale(), Format::row_elements);
            append_k(row, k + Format::header + i / panel_rows * panel_size(dim) + i % panel_rows * 2, dim);
            append_v(row + head.v(), v + Format::header + i / 2 * line_elements, i, dim);
        }
        return block;
    }

    KvBlock<Format> upcoming(Tile &tile, Place) const {
        return {reinterpret_cast<int8_t *>(tile.k_scratch()), reinterpret_cast<int8_t *>(tile.v_scratch())};
    }

private:
    AttentionShape shape_;
    const int8_t *kv_;
};

}  // namespace
}  // namespace ISA
