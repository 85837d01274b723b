// Panels that are streamed from memory, several at a time. Included inside each instruction set.
namespace ISA {
namespace {

constexpr int64_t prefetch_lines = 16, prefetch_bytes = 64 * prefetch_lines;

INLINE void prefetch(const void *line) { __builtin_prefetch(line, 0, 2); }

// Starts reading `count` panels of `size` bytes.
INLINE void prefetch_starts(const void *panels, int64_t count, int64_t size) {
    const char *first = static_cast<const char *>(panels);
    for (int64_t at = 0; at < prefetch_bytes && at < size; at += 64)
        for (int64_t p = 0; p < count; p++) prefetch(first + p * size + at);
}

// A number of panels that is known at compile time.
template <int N>
struct Panels {
    static constexpr int value = N;
};

// Calls multiply with as many of `left` panels at a time as there is code for, at most `most`: Panels; returns how many.
template <int most, class Multiply>
INLINE int64_t with_panels(int64_t left, const Multiply &multiply) {
    if constexpr (most > 1)
        if (left < most) return with_panels<most / 2>(left, multiply);
    multiply(Panels<most>{});
    return most;
}

// Calls multiply(Panels, first of them, first panel of the next chunk, how many of that) for all panels of all chunks,
// behind prepare() for a chunk. The next chunk is taken before this one is done, so that its first lines are on their way.
template <int most, class Prepare, class Multiply>
INLINE void each_panels(Chunks &chunks, const Prepare &prepare, const Multiply &multiply) {
    int64_t panel, end, next, next_end;
    for (bool more = chunks.next(panel, end); more; panel = next, end = next_end) {
        more = chunks.next(next, next_end);
        if (!more) next = next_end = 0;
        prepare();
        while (panel < end)
            panel += with_panels<most>(end - panel, [&](auto some) { multiply(some, panel, next, next_end - next); });
    }
}

// Calls multiply(w, its panels, what is read after them, how many panels of that) for every weight's `count` panels from
// `panel` on: the next weight's, and behind the last one those of the next chunk. Panels have `size` elements.
template <int weights, int count, class Weight, class Multiply>
INLINE void each_weight(const Weight *const *first, int64_t size, int64_t panel, int64_t next, int64_t next_count,
                        const Multiply &multiply) {
    for (int64_t w = 0; w + 1 < weights; w++)
        multiply(w, first[w] + panel * size, first[w + 1] + panel * size, int64_t{count});
    multiply(int64_t{weights - 1}, first[weights - 1] + panel * size, first[0] + next * size, next_count);
}

}  // namespace
}  // namespace ISA
