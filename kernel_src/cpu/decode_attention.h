// Attention of the one query row at position pos over the positions up to pos that it sees, of a KV cache (kv_cache.h); contains a barrier, if
// there are many. Included inside each instruction set.
// q, out bf16 [heads * head_dim].
// Positions are split into ranges that the team attends independently; the partial results are then
// joined head by head, in order: the result does not depend on the number of threads, and is what flash_attention makes
// of the row.
namespace ISA {
namespace {

// Results of all ranges: [range][head] states and [range][head][padded_dim] sums.
struct Partials {
    AttentionRow *states;
    float *sums;
};

// One task: positions begin .. end - 1 of the KV heads kv_begin .. kv_end - 1.
struct Task {
    int64_t range, begin, end, kv_begin, kv_end;

    // Few ranges are divided by heads as well, to occupy the team. A task otherwise takes all heads,
    // because their rows are next to each other in memory.
    static int64_t parts(int64_t ranges, int64_t kv_heads, int64_t threads) {
        const int64_t wanted = (4 * threads + ranges - 1) / ranges;
        return wanted < kv_heads ? wanted : kv_heads;
    }

    // `seen`: the first position; its block is attended as a whole, and its range is the first.
    static Task make(int64_t index, int64_t parts, int64_t seen, int64_t positions, int64_t kv_heads) {
        const int64_t range = index / parts, part = index % parts;
        const int64_t begin = (range + seen / range_positions) * range_positions, block = seen / kv_block_positions * kv_block_positions;
        return {range, begin < block ? block : begin, begin + range_positions < positions ? begin + range_positions : positions,
                kv_heads * part / parts, kv_heads * (part + 1) / parts};
    }
};

// Attends a task's blocks, all heads of one before the next: the order of memory. The block after the last
// one is the first of task `next`.
template <class Kv>
void attend(typename Kv::Tile &tile, const AttentionShape &shape, const Kv &kv, int64_t pos, const Task &task,
                   const Task &next) {
    for (int64_t begin = task.begin; begin < task.end; begin += kv_block_positions) {
        const int64_t left = task.end - begin, count = left < kv_block_positions ? left : kv_block_positions;
        const Place block_after = left > count ? Place{task.kv_begin, begin + count} : Place{next.kv_begin, next.begin};
        for (int64_t head = task.kv_begin; head < task.kv_end; head++) {
            const Place after = head + 1 < task.kv_end ? Place{head + 1, begin} : block_after;
            const KvBlock<typename Kv::Format> taken = kv.take(tile, {head, begin}, count, after);
            tile.attend(taken, kv.upcoming(tile, after), (head - task.kv_begin) * shape.group(), shape.group(), pos,
                        begin, count);
        }
    }
}

template <class Tile>
void keep(const Tile &tile, const AttentionShape &shape, const Task &task, Partials partials) {
    const int64_t rows = (task.kv_end - task.kv_begin) * shape.group(), dim = shape.padded_dim();
    const int64_t first = task.range * shape.heads + task.kv_begin * shape.group();
    for (int64_t r = 0; r < rows; r++) partials.states[first + r] = tile.state(r);
    memcpy(partials.sums + first * dim, tile.sums(0), rows * dim * sizeof(float));
}

void join_ranges(const AttentionShape &shape, Partials partials, int64_t ranges, int64_t head, float *total,
                        bf16 *out) {
    AttentionRow joined = shape.begin(head);
    memset(total, 0, shape.padded_dim() * sizeof(float));
    for (int64_t i = 0; i < ranges; i++) {
        const int64_t row = i * shape.heads + head;
        join(joined, total, partials.states[row], partials.sums + row * shape.padded_dim(), shape.padded_dim());
    }
    store_head(joined, total, shape.head_dim, out + head * shape.head_dim);
}

// The results of a task over the only range are final.
template <class Tile>
void store_heads(Tile &tile, const AttentionShape &shape, const Task &task, bf16 *out) {
    const int64_t rows = (task.kv_end - task.kv_begin) * shape.group(), first = task.kv_begin * shape.group();
    tile.finish_range(0, rows, rows);
    for (int64_t r = 0; r < rows; r++) tile.store_row(r, out + (first + r) * shape.head_dim);
}

// The results of several ranges go to `partials`, of which there are none for a single one.
template <class Kv>
void attend_ranges(const AttentionShape &shape, const bf16 *q, const Kv &kv, bf16 *out, int64_t pos, int64_t ranges,
                          Partials partials, Worker &worker) {
    typename Kv::Tile tile(shape, shape.heads, worker);
    const int64_t parts = Task::parts(ranges, shape.kv_heads, worker.threads), seen = shape.first_seen(pos);
    Chunks chunks(worker, ranges * parts, 1);
    int64_t index, next, unused;
    for (bool more = chunks.next(index, unused); more; index = next) {
        const Task task = Task::make(index, parts, seen, pos + 1, shape.kv_heads);
        more = chunks.next(next, unused);
        const Task following = more ? Task::make(next, parts, seen, pos + 1, shape.kv_heads) : task;
        const int64_t kv_heads = task.kv_end - task.kv_begin, head = task.kv_begin * shape.group();
        tile.start(q + head * shape.head_dim, 1, head, kv_heads * shape.group(), 0);
        attend(tile, shape, kv, pos, task, following);
        if (ranges == 1) store_heads(tile, shape, task, out);
        else keep(tile, shape, task, partials);
    }
}

template <class Kv>
void decode_attention(const AttentionShape &shape, const bf16 *q, const Kv &kv, bf16 *out, int64_t pos,
                             Worker &worker) {
    const int64_t ranges = pos / range_positions - shape.first_seen(pos) / range_positions + 1, rows = ranges * shape.heads;
    if (ranges == 1) return attend_ranges(shape, q, kv, out, pos, ranges, {}, worker);
    float *shared = worker.shared_scratch<float>(rows * (shape.padded_dim() + 2));
    const Partials partials = {reinterpret_cast<AttentionRow *>(shared + rows * shape.padded_dim()), shared};
    attend_ranges(shape, q, kv, out, pos, ranges, partials, worker);
    worker.barrier();
    float *total = worker.scratch<float>(shape.padded_dim());
    Chunks joins(worker, shape.heads, 4);
    for (int64_t head, end; joins.next(head, end);)
        for (; head < end; head++) join_ranges(shape, partials, ranges, head, total, out);
}

}  // namespace
}  // namespace ISA
