// The forms of a KV cache, as sources of blocks for AttentionTile. Included inside each instruction set.
//
//   KvPanels  K and V as attention reads them, [block of 128 positions][head][block] (attention_core.h), in any format;
//             a table says which block holds which positions
//   KvRows    K and V by position, [position][head][2][head_dim]; blocks are packed when due
namespace ISA {
namespace {

struct Place {
    int64_t head, begin;
};

template <class Stored>
class KvPanels {
public:
    using Format = Stored;
    using Tile = AttentionTile<Format>;
    using Number = typename Format::Number;

    KvPanels(const AttentionShape &shape, const Number *k, const Number *v, const int32_t *blocks)
        : shape_(shape), k_(k), v_(v), blocks_(blocks) {}

    // The block at a place, of which `count` positions matter.
    KvBlock<Format> take(Tile &, Place at, int64_t, Place) const { return locate(at); }

    // What attending is to fetch meanwhile.
    KvBlock<Format> upcoming(Tile &, Place next) const { return locate(next); }

private:
    KvBlock<Format> locate(Place at) const {
        const int64_t index = (blocks_[at.begin / kv_block_positions] * shape_.kv_heads + at.head) * kv_block_positions;
        return {k_ + index * (shape_.head_dim + Format::row_elements),
                v_ + index * (shape_.padded_dim() + Format::row_elements)};
    }

    AttentionShape shape_;
    const Number *k_, *v_;
    const int32_t *blocks_;
};

class KvRows {
public:
    using Format = Bf16Kv;
    using Tile = AttentionTile<Format>;

    KvRows(const AttentionShape &shape, const bf16 *kv) : shape_(shape), kv_(kv) {}

    KvBlock<Format> take(Tile &tile, Place at, int64_t count, Place next) const {
        const int64_t dim = shape_.head_dim, stride = shape_.kv_heads * 2 * dim;
        const bf16 *const k = start(at), *const v = k + dim;
        const int64_t ahead = start(next) - k;
        for (int64_t i = 0; i < count; i += panel_rows) {
            const int64_t rows = count - i < panel_rows ? count - i : panel_rows;
            pack_k(k + i * stride, stride, rows, dim / 2, tile.k_scratch() + i * dim, ahead);
            pack_v(v + i * stride, stride, rows, dim, tile.v_scratch() + i / 2 * line_elements,
                   panel_size(kv_block_positions), ahead);
        }
        return upcoming(tile, next);
    }

    // Nothing but the block itself: its successor is fetched while it is packed.
    KvBlock<Format> upcoming(Tile &tile, Place) const { return {tile.k_scratch(), tile.v_scratch()}; }

private:
    const bf16 *start(Place at) const { return kv_ + (at.begin * shape_.kv_heads + at.head) * 2 * shape_.head_dim; }

    AttentionShape shape_;
    const bf16 *kv_;
};

}  // namespace
}  // namespace ISA
