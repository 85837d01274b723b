// Matrix times weight panels, for any rows >= 1, with an epilogue. Included inside each instruction set.
//
// An Epilogue says which panels form a group and what becomes of the f32 sums:
//   static constexpr int64_t weights     matrices the group is taken from, tile_panels / weights of each
//   void row(const float *sums, int64_t r, int64_t column, int64_t count)
//       sums of weight w, column + i are at sums[w * columns of the group + i], i < count
//   out, out_cols                        what it writes, by rows
namespace ISA {
namespace {

constexpr int64_t pairs_per_block = 1024;  // weights of a task stay in L2: 256 KB

// Panels of a group, rows that are multiplied at a time, and rows of a task, whose sums stay in L2.
#if ISA_AMX
constexpr int64_t group_panels = 8, step_rows = 2 * tile_lines, rows_per_task = 16 * step_rows;
#else
constexpr int64_t group_panels = tile_panels, step_rows = tile_rows, rows_per_task = 43 * step_rows;
#endif

// A task of at most so many rows waits for its weights. Its blocks are short, and the next one is asked for line by line: many
// requests at once would have to be answered before the products begin. Tiles of AMX have no loop over lines.
constexpr int64_t few_rows = ISA_AMX || !tiles_fetch ? 0 : 4 * tile_rows, short_block_lines = 256;

// Returns the length of a block, so that blocks are even.
INLINE int64_t even_block(int64_t length, int64_t most) {
    const int64_t blocks = (length + most - 1) / most;
    return (length + blocks - 1) / blocks;
}

// A task's rows in steps of at most `most`. They are even, because sums of few rows wait for each other; tiles of AMX take as
// long for few rows, and read memory for whole steps.
struct Steps {
    int64_t rows, most;
    int64_t count = (rows + most - 1) / most;

    INLINE_MEMBER int64_t first(int64_t step) const {
        if (!ISA_AMX) return rows * step / count;
        return step < count ? step * most : rows;
    }
};

// Weights that are read soon, `bytes` of each panel. Products that first widen a block, or have few columns, would wait for
// them.
struct Upcoming {
    const char *panels[group_panels];
    int64_t bytes;

    // Asks for the share of step `step` of `count`, so that requests come evenly.
    INLINE_MEMBER void fetch(int64_t step, int64_t count) const {
        const int64_t last = (bytes * (step + 1) / count + 63) / 64;
        for (int64_t line = (bytes * step / count + 63) / 64; line < last; line++)
            for (int64_t p = 0; p < group_panels; p++) __builtin_prefetch(panels[p] + line * 64, 0, 2);
    }

    // Lets a tile ask for the share of step `step` of `count`, with each of the `lines` lines that it reads from `first` on, in
    // panel 0. The other panels are as far from theirs.
    template <class Number, class Args>
    INLINE_MEMBER void share(const Number *first, int64_t lines, int64_t step, int64_t count, Args &args) const {
        args.ahead_step = (64 / static_cast<int64_t>(sizeof(Number)) + count - 1) / count;
        args.ahead = bytes == 0 ? 0 : reinterpret_cast<const Number *>(panels[0]) - first + step * lines * args.ahead_step;
    }
};

// Rows first .. last - 1 of a group of columns. `following`: the group that the worker is likely to take next; groups behind
// the last one are those of `behind`.
struct GemmTask {
    int64_t group, first, last, following;
};

// The output of a product in groups of columns, of group_panels, and in tasks of rows. A panel of the
// weights has `panel_elements`.
template <class Weight, class Epilogue>
struct PanelGroups {
    static constexpr int64_t panels = group_panels / Epilogue::weights, columns = panels * panel_rows;

    const Weight *const *weights;
    int64_t panel_elements, rows, out_cols;
    int64_t row_tasks = (rows + rows_per_task - 1) / rows_per_task;
    const Weight *const *behind = nullptr;  // weights that are multiplied with after these, if there are any

    // Where groups are large and tasks long, so that there are some for each thread of a team.
    void divide(int64_t threads) {
        while (ISA_AMX && groups() * row_tasks < 4 * threads && row_tasks * step_rows < rows) row_tasks *= 2;
    }

    // Rows of x that steps read.
    int64_t padded_rows() const { return (rows + step_rows - 1) / step_rows * step_rows; }

    int64_t groups() const { return (panel_count(out_cols) + panels - 1) / panels; }

    // Evenly many, so that the last task is not a sliver.
    int64_t task_rows() const {
        const int64_t steps = (rows + step_rows - 1) / step_rows;
        return (steps + row_tasks - 1) / row_tasks * step_rows;
    }

    // Calls multiply(GemmTask) for each task that this worker takes.
    template <class Multiply>
    void each_task(Worker &worker, const Multiply &multiply) const {
        const int64_t step = task_rows(), tasks = (rows + step - 1) / step;
        Chunks chunks(worker, groups() * tasks, 1);
        // All groups of some rows follow each other: a worker that multiplies rows finds them in its caches, and so does the next
        // kernel if it divides its work by rows. Weights are read once for each task of rows.
        for (int64_t task, end; chunks.next(task, end);) {
            const int64_t group = task % groups(), first = task / groups() * step, last = first + step < rows ? first + step : rows;
            multiply({group, first, last, last == rows ? group + 1 : (group + 1) % groups()});
        }
    }

    // Panel p of a tile. Past the last panel, the last one is computed again and the result dropped.
    const Weight *panel(int64_t group, int64_t p) const { return panel(weights, group, p); }

    const Weight *panel(const Weight *const *of, int64_t group, int64_t p) const {
        const int64_t index = group * panels + p % panels, last = panel_count(out_cols) - 1;
        return of[p / panels] + (index < last ? index : last) * panel_elements;
    }

    // What a task reads behind the first `done` elements of its panels: a block of `block` elements, behind the last one
    // the first of the next task.
    NOINLINE Upcoming upcoming(const GemmTask &task, int64_t done, int64_t block) const {
        const bool same = done < panel_elements;
        const int64_t group = same ? task.group : task.following, begin = same ? done : 0, left = panel_elements - begin;
        const bool here = group * panels < panel_count(out_cols);
        if (!here && (behind == nullptr || group >= 2 * groups())) return {};
        Upcoming next;
        next.bytes = (block < left ? block : left) * static_cast<int64_t>(sizeof(Weight));
        for (int64_t p = 0; p < group_panels; p++)
            next.panels[p] = reinterpret_cast<const char *>((here ? panel(group, p) : panel(behind, group - groups(), p)) + begin);
        return next;
    }

    // Between rows' sums. What a single block makes is finished at once: sums then stay in the first-level cache.
    static int64_t kept(bool several_blocks) { return several_blocks ? group_panels * panel_rows : 0; }

    // The sums of one row of a group. Whole groups have a loop of known length.
    INLINE_MEMBER void finish(Epilogue &epilogue, int64_t group, int64_t row, const float *sums) const {
        const int64_t column = group * columns, left = out_cols - column;
        if (left >= columns) return epilogue.row(sums, row, column, columns);
        epilogue.row(sums, row, column, left);
    }

    // Asks for what finishing `count` rows of a group touches, while they are being multiplied.
    INLINE_MEMBER void expect(const Epilogue &epilogue, int64_t group, int64_t row, int64_t count) const {
        const int64_t column = group * columns, left = out_cols - column;
        for (int64_t r = row; r < row + count; r++) expect_row(epilogue, r, column, left < columns ? left : columns);
    }
};

// A product without tiles takes the registers that every thread has.
struct NoRegisters {};

template <class Epilogue>
class Gemm {
public:
    Gemm(const bf16 *x, const bf16 *const *weights, int64_t rows, int64_t cols, int64_t out_cols,
         const Epilogue &epilogue)
        : x_(x), groups_{weights, panel_size(cols), rows, out_cols}, cols_(cols), epilogue_(epilogue) {}

    void run(Worker &worker) {
        work_in(worker.scratch<char>(work_bytes(groups_.task_rows())));
        groups_.each_task(worker, [&](const GemmTask &task) { multiply(task); });
    }

    using Registers = NoRegisters;  // what a thread holds while it multiplies
    using Groups = PanelGroups<bf16, Epilogue>;
    static constexpr int64_t line_width = tile_panels * panel_rows;

    // What a worker needs for tasks of so many rows.
    static int64_t work_bytes(int64_t rows) { return rows * line_width * static_cast<int64_t>(sizeof(float)); }
    void work_in(char *memory) { sums_ = reinterpret_cast<float *>(memory); }

    // Rows of x that were gathered: their memory, in which each is taken before it is multiplied.
    static int64_t kept_bytes(int64_t rows, int64_t cols) { return rows * cols * static_cast<int64_t>(sizeof(bf16)); }
    void keep_in(uint8_t *memory, int64_t) { x_ = kept_ = reinterpret_cast<bf16 *>(memory); }
    void take(int64_t row, const bf16 *x) { memcpy(kept_ + row * cols_, x, cols_ * sizeof(bf16)); }

    // Others, with rows of x from `first` on.
    void turn_to(const Groups &groups, int64_t first, const Epilogue &epilogue) {
        groups_ = groups;
        first_ = first;
        epilogue_ = epilogue;
    }

    void multiply(const GemmTask &task) {
        const int64_t pairs = pair_count(cols_), rows = task.last - task.first;
        const bool few = rows <= few_rows;
        const int64_t block = few ? even_block(pairs, short_block_lines) : pairs_per_block;
        const int64_t kept = groups_.kept(pairs > block);
        const Steps steps = {rows, tile_rows};
        for (int64_t done = 0; done < pairs; done += block) {
            const int64_t until = done + block < pairs ? done + block : pairs;
            const Upcoming next = groups_.upcoming(task, until * line_elements, block * line_elements);
            for (int64_t step = 0; step < steps.count; step++) {
                const int64_t at = steps.first(step), row = task.first + at, count = steps.first(step + 1) - at;
                float *sums = sums_ + at * kept;
                TileArgs args;
                if (few) next.share(groups_.panel(task.group, 0) + done * line_elements, until - done, step, steps.count, args);
                else next.fetch(step, steps.count);
                if (until == pairs) groups_.expect(epilogue_, task.group, row, count);
                multiply_block(task.group, row, count, done, until, args, sums);
                if (until == pairs) finish(task.group, row, count, sums);
            }
        }
    }

private:
    const bf16 *row_of_x(int64_t row) const { return x_ + (first_ + row) * cols_; }

    // Pairs done .. until - 1 of rows row .. row + count - 1.
    void multiply_block(int64_t group, int64_t row, int64_t count, int64_t done, int64_t until, TileArgs args, float *sums) {
        for (int64_t p = 0; p < tile_panels; p++)
            args.panels[p] = groups_.panel(group, p) + done * line_elements;
        args.x = row_of_x(row) + 2 * done;
        args.x_stride = cols_;
        args.out = sums;
        args.out_stride = line_width;
        args.accumulate = done > 0;
        const int64_t whole = until <= cols_ / 2 ? until : cols_ / 2;
        args.pairs = whole - done;
        if (args.pairs > 0 || whole == until) tile_of_rows<tile_panels>(count, args);
        if (whole < until) last_column(row, count, whole - done, args);
    }

    // An odd last column: x has no partner for it to be loaded with.
    void last_column(int64_t row, int64_t count, int64_t offset, TileArgs &args) {
        bf16 pairs[tile_rows][2];
        for (int64_t r = 0; r < count; r++) {
            pairs[r][0] = row_of_x(row + r)[cols_ - 1];
            pairs[r][1] = 0;
        }
        for (int64_t p = 0; p < tile_panels; p++) args.panels[p] += offset * line_elements;
        args.accumulate = args.accumulate || offset > 0;
        args.ahead = 0;
        args.x = pairs[0];
        args.x_stride = 2;
        args.pairs = 1;
        tile_of_rows<tile_panels>(count, args);
    }

    void finish(int64_t group, int64_t row, int64_t rows, const float *sums) {
        for (int64_t r = 0; r < rows; r++) groups_.finish(epilogue_, group, row + r, sums + r * line_width);
    }

    const bf16 *x_;
    PanelGroups<bf16, Epilogue> groups_;
    int64_t cols_;
    Epilogue epilogue_;
    float *sums_ = nullptr;
    bf16 *kept_ = nullptr;
    int64_t first_ = 0;
};

}  // namespace
}  // namespace ISA
