// Causal attention of query rows pos .. pos + seq - 1 over the positions that they see of a KV cache in panels. Included
// inside each instruction set.
// q, out bf16 [seq][heads * head_dim]. Both products are bf16 with f32 accumulation; softmax is f32 and online; its
// weights are rounded to bf16 before they meet V, relative to about the largest score so far of a range. With 8 bits, q by
// rows and weights by rows and blocks are rounded to fixed point instead, and products are exact.
// A row is the same bits whatever rows it is computed with, and as decode_attention has it.
namespace ISA {
namespace {

// rows = positions x a group of heads.
template <class Tile>
void store_rows(const Tile &tile, const AttentionShape &shape, int64_t rows, bf16 *out) {
    for (int64_t r = 0; r < rows; r++) {
        const int64_t position = r / shape.group(), head = r % shape.group();
        tile.store_row(r, out + (position * shape.heads + head) * shape.head_dim);
    }
}

template <class Format>
void flash_attention(const bf16 *q, const typename Format::Number *k, const typename Format::Number *v, bf16 *out,
                            int64_t seq, int64_t pos, const AttentionShape &shape, const int32_t *blocks, Worker &worker) {
    const KvPanels<Format> kv(shape, k, v, blocks);
    const int64_t group = shape.group(), stride = shape.heads * shape.head_dim;
    // Rows enough to pay for reading K and V, and few enough for their sums to stay in L2.
    const int64_t wanted = group < 288 ? 288 / group : 1;
    const int64_t positions = wanted < seq ? wanted : seq;
    const int64_t tiles = (seq + positions - 1) / positions;
    AttentionTile<Format> tile(shape, positions * group, worker);
    Chunks chunks(worker, tiles * shape.kv_heads, 1);
    for (int64_t task, unused; chunks.next(task, unused);) {
        // Of a head, the last rows attend the most: they go first, so that the team finishes together.
        const int64_t first = (tiles - 1 - task % tiles) * positions, head = task / tiles;
        const int64_t count = first + positions < seq ? positions : seq - first, end = pos + first + count;
        const int64_t start = first * stride + head * group * shape.head_dim;
        tile.start(q + start, count, head * group, group, stride);
        const int64_t seen = shape.first_seen(pos + first) / kv_block_positions * kv_block_positions;
        for (int64_t begin = seen; begin < end; begin += kv_block_positions) {
            const bool last = begin + kv_block_positions >= end;
            const int64_t block = last ? end - begin : kv_block_positions;
            const Place next = {head, last ? begin : begin + block};
            const KvBlock<Format> taken = kv.take(tile, {head, begin}, block, next);
            tile.attend(taken, kv.upcoming(tile, next), 0, count * group, pos + first, begin, block);
            const int64_t range = begin / range_positions * range_positions;
            if (last || begin + block == range + range_positions) {
                // Rows before the range, and those that do not see so far back, found nothing in it.
                const int64_t seeing = begin + block + shape.sees - 1 - pos - first;
                tile.finish_range(range > pos + first ? (range - pos - first) * group : 0,
                                  (seeing < count ? seeing : count) * group, count * group);
            }
        }
        store_rows(tile, shape, count * group, out + start);
    }
}

}  // namespace
}  // namespace ISA
