// Matrix times weight panels, for any rows >= 1, with an epilogue. Included inside each instruction set.
//
// An Epilogue says which panels form a group and what becomes of the f32 sums:
//   static constexpr int64_t weights     matrices the group is taken from, tile_panels / weights of each
//   void row(const float *sums, int64_t r, int64_t column, int64_t count)
//       sums of weight w, column + i are at sums[w * group_columns + i], i < count
namespace ISA {
namespace {

constexpr int64_t rows_per_task = 43 * tile_rows;  // f32 sums of a task stay in L2
constexpr int64_t pairs_per_block = 1024;          // and so do its weights: 256 KB

template <class Epilogue>
class Gemm {
public:
    static constexpr int64_t group_panels = tile_panels / Epilogue::weights;
    static constexpr int64_t group_columns = group_panels * panel_rows;

    Gemm(const bf16 *x, const bf16 *const *weights, int64_t rows, int64_t cols, int64_t out_cols,
         const Epilogue &epilogue)
        : x_(x), weights_(weights), rows_(rows), cols_(cols), out_cols_(out_cols), epilogue_(epilogue) {}

    void run(Worker &worker) {
        const int64_t groups = (panel_count(out_cols_) + group_panels - 1) / group_panels;
        const int64_t row_tasks = (rows_ + rows_per_task - 1) / rows_per_task;
        // Evenly large, so that the last one is not a sliver.
        const int64_t tiles = (rows_ + tile_rows - 1) / tile_rows;
        const int64_t task_rows = (tiles + row_tasks - 1) / row_tasks * tile_rows;
        sums_ = worker.scratch<float>(task_rows * line_width);
        Chunks chunks(worker, groups * row_tasks, 1);
        // Row tasks of one group follow each other: its weights come from memory once.
        for (int64_t task, end; chunks.next(task, end);) {
            const int64_t first = task % row_tasks * task_rows;
            const int64_t last = first + task_rows < rows_ ? first + task_rows : rows_;
            multiply(task / row_tasks, first, last);
        }
    }

private:
    static constexpr int64_t line_width = tile_panels * panel_rows;

    void multiply(int64_t group, int64_t first, int64_t last) {
        const int64_t pairs = pair_count(cols_);
        for (int64_t done = 0; done < pairs; done += pairs_per_block) {
            const int64_t until = done + pairs_per_block < pairs ? done + pairs_per_block : pairs;
            for (int64_t row = first; row < last; row += tile_rows) {
                const int64_t count = last - row < tile_rows ? last - row : tile_rows;
                float *sums = sums_ + (row - first) * line_width;
                multiply_block(group, row, count, done, until, sums);
                if (until == pairs) finish(group, row, count, sums);
            }
        }
    }

    // Pairs done .. until - 1 of rows row .. row + count - 1.
    void multiply_block(int64_t group, int64_t row, int64_t count, int64_t done, int64_t until, float *sums) {
        TileArgs args;
        for (int64_t p = 0; p < tile_panels; p++)
            args.panels[p] = panel(group, p) + done * line_elements;
        args.x = x_ + row * cols_ + 2 * done;
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
            pairs[r][0] = x_[(row + r) * cols_ + cols_ - 1];
            pairs[r][1] = 0;
        }
        for (int64_t p = 0; p < tile_panels; p++) args.panels[p] += offset * line_elements;
        args.accumulate = args.accumulate || offset > 0;
        args.x = pairs[0];
        args.x_stride = 2;
        args.pairs = 1;
        tile_of_rows<tile_panels>(count, args);
    }

    // Past the last panel, the last one is computed again and the result dropped.
    const bf16 *panel(int64_t group, int64_t p) const {
        const int64_t index = group * group_panels + p % group_panels;
        const int64_t last = panel_count(out_cols_) - 1;
        return weights_[p / group_panels] + (index < last ? index : last) * panel_size(cols_);
    }

    void finish(int64_t group, int64_t row, int64_t rows, const float *sums) {
        const int64_t column = group * group_columns;
        const int64_t count = out_cols_ - column < group_columns ? out_cols_ - column : group_columns;
        for (int64_t r = 0; r < rows; r++) epilogue_.row(sums + r * line_width, row + r, column, count);
    }

    const bf16 *x_;
    const bf16 *const *weights_;
    int64_t rows_, cols_, out_cols_;
    Epilogue epilogue_;
    float *sums_ = nullptr;
};

}  // namespace
}  // namespace ISA
