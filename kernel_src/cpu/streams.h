// Panels that are streamed from memory, several at a time. Included inside each instruction set.
namespace ISA {
namespace {

// How far ahead a stream asks for its lines.
static const int64_t prefetch_lines = reads_ahead ? 16 : 24;

// A number of panels that is known at compile time. Each asks for lines `skew` bytes further ahead than the one before it, and,
// where `soon` is not 0, into L1 for what is read so many groups later.
template <int N, int64_t skew_bytes = 0>
struct Panels {
    static constexpr int value = N, soon = 0;
    static constexpr int64_t skew = skew_bytes;
    using Half = Panels<N / 2, skew_bytes>;
};

// Of `most` panels, so many are read at a time where the machine does not ask for lines itself. Panels often lie whole pages
// apart, and what a machine asks for by itself ends with a page: skewed, they do not all come to one's end at once.
template <int most>
using AskingPanels = Panels<(most < 4 ? most : 4), ISA_LANES == 16 ? 512 : 0>;

constexpr int64_t least_chunk_bytes = 65536;  // of weights: fewer are not worth the handing out
constexpr int64_t most_chunk_bytes = 1 << 22;  // a worker that is held up keeps no more from the others

// In assembly, because a compiler moves its own to the front of a loop's body, where they come in one burst, wait for
// each other, and leave memory idle until the next one. `near`: into L1, what is due within a group.
template <bool near = false>
INLINE void prefetch(const void *line) {
#if defined(__x86_64__)
    if (near) asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char *>(line)));
    else asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char *>(line)));
#else
    __builtin_prefetch(line, 0, near ? 3 : 2);
#endif
}

// The panels that a worker was given, up to `end`, and those that it took after them. At hand are `panel` and others that
// are `apart`; `following` comes behind it, with as many.
struct Turn {
    Chunks &chunks;
    const Joined *joined = nullptr;
    int64_t panel = 0, end = 0, next = 0, next_end = 0;
    bool more = false;
    int64_t apart = 1, following = 0;

    // Where a panel of `size` elements lies, from the first one on.
    INLINE_MEMBER int64_t place(int64_t number, int64_t size) const {
        return number * size + (joined == nullptr ? 0 : joined->jumps[joined->of(number)]);
    }

    void take() {
        more = chunks.next(next, next_end);
        if (!more) next = next_end = 0;
    }
};

// What is read behind some panels: `known`, or else the first panels of the worker's next chunk, which it takes when it
// asks. So it asks once, and late: what one worker has taken, another does not find when it is done.
template <class Weight>
struct After {
    const Weight *known, *weight;
    int64_t size;  // of a panel
    Turn &turn;

    // How far it is from `here` to what comes then, in elements; 0 where nothing comes.
    INLINE_MEMBER int64_t distance(const Weight *here) const {
        if (known != nullptr) return known - here;
        turn.take();
        return turn.more ? weight + turn.place(turn.next, size) - here : 0;
    }
};

// Calls run(Panels): how many streams there are, at most `most`.
template <int most, class Run>
INLINE void with_streams(const Run &run) {
    if (reads_ahead) run(Panels<most>{});
    else run(AskingPanels<most>{});
}

// Calls multiply with as many of `left` panels at a time as there is code for, at most `Most`: Panels; returns how many.
template <class Most, class Multiply>
INLINE int64_t with_panels(int64_t left, const Multiply &multiply) {
    if constexpr (Most::value > 1)
        if (left < Most::value) return with_panels<typename Most::Half>(left, multiply);
    multiply(Most{});
    return Most::value;
}

constexpr int64_t kept_panels = 256;  // at most

// The matrices whose results an epilogue takes, where these are several.
template <class Epilogue>
INLINE const Joined *joined_by(const Epilogue &) {
    return nullptr;
}

// What an epilogue makes of some panels of a row, kept until they are complete and written at once: where a machine reads
// slower while a store waits for its line, which it does on Granite Rapids.
template <class Epilogue>
class KeptRow {
public:
    explicit KeptRow(const Epilogue &epilogue) : epilogue_(epilogue), keeping_(epilogue) {}

    // The epilogue of panels from `panel` on.
    INLINE_MEMBER const Epilogue &begin(int64_t panel) {
        if (!reads_ahead) keeping_.out = kept_ - panel * panel_rows;
        return keeping_;
    }

    // Panels `panel` to `end` - 1 are complete.
    INLINE_MEMBER void write(int64_t panel, int64_t end) const {
        if (reads_ahead) return;
        const int64_t first = panel * panel_rows, left = epilogue_.out_cols - first, count = (end - panel) * panel_rows;
        memcpy(epilogue_.out + first, kept_, (count < left ? count : left) * sizeof *kept_);
    }

private:
    Epilogue epilogue_, keeping_;
    alignas(line_bytes) std::remove_pointer_t<decltype(Epilogue::out)> kept_[kept_panels * panel_rows];
};

// Chunks of as many panels, a power of two and at most `kept_panels`, while there are many. `panel_bytes`: of weights.
INLINE Chunks panel_chunks(Worker &worker, int64_t panels, int64_t streams, int64_t panel_bytes) {
    const int64_t least = least_chunk_bytes / panel_bytes;
    int64_t most = 1;
    while (most < kept_panels && 2 * most * panel_bytes <= most_chunk_bytes) most *= 2;
    return Chunks(worker, panels, most, least < streams ? least : streams);
}

// Calls multiply(Panels) for the panels of a turn from `first` on. Each of `Most` streams has a run of panels that lie one
// behind the other: it goes on where it is, and so does what the machine fetches for it.
template <class Most, class Multiply>
INLINE void run_panels(Turn &turn, int64_t first, const Multiply &multiply) {
    const int64_t run = (turn.end - first) / Most::value, behind = first + run * Most::value;
    for (turn.panel = first; turn.panel < turn.end; turn.panel = turn.following) {
        const bool running = turn.panel < first + run;
        turn.apart = running ? run : 1;
        with_panels<Most>(running ? Most::value : turn.end - turn.panel, [&](auto some) {
            turn.following = turn.panel + (running ? 1 : some.value);
            if (turn.following == first + run) turn.following = behind;
            multiply(some);
        });
    }
}

struct Nothing {
    template <class... Some>
    INLINE_MEMBER void operator()(Some...) const {}
};

// Calls multiply(Panels, the turn that they are in) for all panels of all chunks; prepare() before the first of them, and
// begin(panel) and end(panel, end) before and after those of a chunk.
template <class Most, class Multiply, class Prepare = Nothing, class Begin = Nothing, class End = Nothing>
INLINE void each_turn(Chunks &chunks, const Joined *joined, const Multiply &multiply, const Prepare &prepare = {}, const Begin &begin = {},
                      const End &end = {}) {
    if (joined != nullptr) chunks.cut_at(joined->begins[1], joined->begins[2]);
    Turn turn = {chunks, joined};
    turn.take();
    if (turn.more) prepare();
    while (turn.more) {
        const int64_t first = turn.next;
        turn.end = turn.next_end;
        begin(first);
        run_panels<Most>(turn, first, [&](auto some) { multiply(some, turn); });
        end(first, turn.end);
    }
}

// The same of a row's panels, with the epilogue to finish them with: multiply(Panels, turn, epilogue).
template <class Most, class Epilogue, class Prepare, class Multiply>
INLINE void each_panels(Chunks &chunks, const Epilogue &epilogue, const Prepare &prepare, const Multiply &multiply) {
    KeptRow<Epilogue> row(epilogue);
    const Epilogue *keeping = nullptr;
    each_turn<Most>(
        chunks, joined_by(epilogue), [&](auto some, Turn &turn) { multiply(some, turn, *keeping); }, prepare,
        [&](int64_t first) { keeping = &row.begin(first); }, [&](int64_t first, int64_t end) { row.write(first, end); });
}

// What is read behind the panels of a turn, where they are those of the first weight.
template <class Weight>
INLINE After<Weight> after_turn(const Weight *first, int64_t size, Turn &turn) {
    return {turn.following < turn.end ? first + turn.place(turn.following, size) : nullptr, first, size, turn};
}

// Calls multiply(w, its first panel, what is read behind it: After) for every weight's panels of a turn. Panels have
// `size` elements.
template <int weights, class Weight, class Multiply>
INLINE void each_weight(const Weight *const *first, int64_t size, Turn &turn, const Multiply &multiply) {
    for (int64_t w = 0; w < weights; w++) {
        const int64_t at = turn.place(turn.panel, size);
        multiply(w, first[w] + at,
                 w + 1 < weights ? After<Weight>{first[w + 1] + at, first[0], size, turn} : after_turn(first[0], size, turn));
    }
}

}  // namespace
}  // namespace ISA
