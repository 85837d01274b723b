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

// Calls multiply(first panel, how many, first panel of the next chunk, how many of that) for every chunk. The next chunk is
// taken before this one is done, so that its first lines are on their way.
template <class Multiply>
INLINE void each_chunk(Chunks &chunks, const Multiply &multiply) {
    int64_t panel, end, next, next_end;
    for (bool more = chunks.next(panel, end); more; panel = next, end = next_end) {
        more = chunks.next(next, next_end);
        if (!more) next = next_end = 0;
        multiply(panel, end - panel, next, next_end - next);
    }
}

}  // namespace
}  // namespace ISA
