// The experts of a prompt's rows (experts.h). Each expert's rows are gathered, so that its weights are read once for all of
// them. Included inside each instruction set.
namespace ISA {
namespace {

// The rows of all experts, those of expert e from starts[e] to starts[e + 1], in their order; each with its share.
struct SortedRows {
    int32_t *starts, *rows;
    float *shares;

    static int64_t bytes(const Experts &experts, int64_t rows) {
        return (4 * (experts.count + 1 + 2 * rows * experts.top) + 63) / 64 * 64;
    }

    static SortedRows at(uint8_t *memory, const Experts &experts, int64_t rows) {
        int32_t *starts = reinterpret_cast<int32_t *>(memory), *sorted = starts + experts.count + 1;
        return {starts, sorted, reinterpret_cast<float *>(sorted + rows * experts.top)};
    }

    void sort(const Experts &experts, const int32_t *chosen, const float *given, int64_t count) const {
        const int64_t all = count * experts.top;
        for (int64_t e = 0; e <= experts.count; e++) starts[e] = 0;
        for (int64_t i = 0; i < all; i++) starts[experts.id(chosen, i) + 1]++;
        for (int64_t e = 0; e < experts.count; e++) starts[e + 1] += starts[e];
        for (int64_t i = 0; i < all; i++) {
            const int64_t place = starts[experts.id(chosen, i)]++;
            rows[place] = static_cast<int32_t>(i / experts.top);
            if (given != nullptr) shares[place] = given[i];
        }
        // Each start has become that of the next expert.
        for (int64_t e = experts.count; e > 0; e--) starts[e] = starts[e - 1];
        starts[0] = 0;
    }

    // The first row of an expert that is not before row `row` of the prompt.
    int64_t from(int64_t expert, int64_t row) const {
        int64_t first = starts[expert], last = starts[expert + 1];
        while (first < last) {
            const int64_t middle = (first + last) / 2;
            if (rows[middle] < row) first = middle + 1;
            else last = middle;
        }
        return first;
    }
};

// Sorts rows, and calls take(row in order, row of the prompt) for each; contains two barriers.
template <class Take>
INLINE void sort_and_take(const Experts &experts, const int32_t *chosen, const float *shares, int64_t rows,
                          const SortedRows &sorted, const Take &take, Worker &worker) {
    {
        Chunks once(worker, 1, 1);
        for (int64_t begin, end; once.next(begin, end);) sorted.sort(experts, chosen, shares, rows);
    }
    worker.barrier();
    {
        Chunks chunks(worker, rows * experts.top, 8);
        for (int64_t i, end; chunks.next(i, end);)
            for (; i < end; i++) take(i, sorted.rows[i]);
    }
    worker.barrier();
}

// Rows that have memory, where `rows` are multiplied from any of them on: steps read whole tiles.
INLINE int64_t with_last_step(int64_t rows) { return ISA_AMX ? rows + step_rows - 1 : rows; }

// Rows whose sums have memory, in tasks of `rows` or fewer.
INLINE int64_t rows_of_work(int64_t rows) {
    const int64_t most = rows < rows_per_task ? rows : rows_per_task;
    return ISA_AMX ? (most + step_rows - 1) / step_rows * step_rows : most;
}

// The expert behind `e` that has rows, or experts.count.
INLINE int64_t next_taken(const Experts &experts, const SortedRows &sorted, int64_t e) {
    do e++;
    while (e < experts.count && sorted.starts[e] == sorted.starts[e + 1]);
    return e;
}

// All rows of an expert, some at a time. `following`: as in GemmTask, behind the last of them.
template <class Gemm>
INLINE void multiply_rows(Gemm &gemm, int64_t group, int64_t rows, int64_t following) {
    for (int64_t row = 0; row < rows; row += rows_per_task) {
        const bool last = rows - row <= rows_per_task;
        gemm.multiply({group, row, last ? rows : row + rows_per_task, last ? following : group});
    }
}

// out: a row for each row in order.
template <template <class> class Gemm, class Weight>
void gate_and_up_of_rows(const GateAndUp<Weight> &args, int64_t panel_elements, int64_t rows, Worker &worker) {
    using Epilogue = GatedExpert<group_panels / 2 * panel_rows>;
    const Experts &experts = args.experts;
    const int64_t all = rows * experts.top, size = panel_count(args.out_cols) * panel_elements, kept = with_last_step(all);
    uint8_t *shared = worker.shared_scratch<uint8_t>(SortedRows::bytes(experts, rows) + Gemm<Epilogue>::kept_bytes(kept, args.cols));
    const SortedRows sorted = SortedRows::at(shared, experts, rows);
    Gemm<Epilogue> gemm(nullptr, nullptr, 0, args.cols, args.out_cols, {});
    gemm.keep_in(shared + SortedRows::bytes(experts, rows), kept);
    sort_and_take(experts, args.chosen, nullptr, rows, sorted,
                  [&](int64_t i, int64_t row) { gemm.take(i, args.x + row * args.cols); }, worker);
    gemm.work_in(worker.scratch<char>(Gemm<Epilogue>::work_bytes(rows_of_work(all))));
    [[maybe_unused]] const typename Gemm<Epilogue>::Registers registers;
    // As many loops and tasks whatever was chosen: who comes late may find other choices.
    const int64_t groups = typename Gemm<Epilogue>::Groups{nullptr, panel_elements, 0, args.out_cols}.groups();
    Chunks chunks(worker, experts.count * groups, 1);
    for (int64_t task, end; chunks.next(task, end);) {
        const int64_t e = task / groups, group = task % groups, begin = sorted.starts[e], own_rows = sorted.starts[e + 1] - begin;
        if (own_rows == 0) continue;
        const int64_t next = next_taken(experts, sorted, e);
        const Weight *own[] = {args.gate + e * size, args.up + e * size};
        const Weight *behind[] = {args.gate + next * size, args.up + next * size};
        gemm.turn_to({own, panel_elements, own_rows, args.out_cols, 0, next < experts.count ? behind : nullptr}, begin,
                     args.template epilogue<group_panels / 2 * panel_rows>(e, begin));
        multiply_rows(gemm, group, own_rows, group + worker.threads);
    }
}

// Adds sums of an expert to the totals of some columns, f32 [rows of the prompt, from `first` on][width].
struct AddShares {
    static constexpr int64_t weights = 1, width = group_panels * panel_rows;
    float *totals;
    int64_t first;
    const int32_t *rows;
    const float *shares;
    const bf16 *bias;

    INLINE_MEMBER void row(const float *sums, int64_t r, int64_t column, int64_t count) const {
        add_share(totals + (rows[r] - first) * width, sums, shares[r], bias, column, count);
    }
};

INLINE void expect_row(const AddShares &, int64_t, int64_t, int64_t) {}

// So many rows' totals of a group of columns stay in L2.
constexpr int64_t shared_rows = 1024;

// One group of columns of rows `first` to `last` - 1.
template <template <class> class Gemm, class Weight>
INLINE void add_experts(Gemm<AddShares> &gemm, const SharedDown<Weight> &args, int64_t panel_elements, const SortedRows &sorted,
                        int64_t group, int64_t first, int64_t last, float *totals) {
    const int64_t size = panel_count(args.out_cols) * panel_elements, count = args.experts.count;
    const int64_t groups = typename Gemm<AddShares>::Groups{nullptr, panel_elements, 0, args.out_cols}.groups();
    for (int64_t e = next_taken(args.experts, sorted, -1), next; e < count; e = next) {
        next = next_taken(args.experts, sorted, e);
        const int64_t begin = sorted.from(e, first), rows = sorted.from(e, last) - begin;
        const Weight *own[] = {args.weight + e * size}, *behind[] = {args.weight + next * size};
        gemm.turn_to({own, panel_elements, rows, args.out_cols, 0, next < count ? behind : nullptr}, begin,
                     {totals, first, sorted.rows + begin, sorted.shares + begin, bias_of(args.bias, e, args.out_cols)});
        multiply_rows(gemm, group, rows, group + groups);
    }
}

// x: a row for each row in order.
template <template <class> class Gemm, class Weight>
void down_of_rows(const SharedDown<Weight> &args, int64_t panel_elements, int64_t rows, Worker &worker) {
    const Experts &experts = args.experts;
    const int64_t all = rows * experts.top, order = SortedRows::bytes(experts, rows), kept = with_last_step(all);
    uint8_t *shared = worker.shared_scratch<uint8_t>(order + Gemm<AddShares>::kept_bytes(kept, args.cols));
    const SortedRows sorted = SortedRows::at(shared, experts, rows);
    Gemm<AddShares> gemm(nullptr, nullptr, 0, args.cols, args.out_cols, {});
    gemm.keep_in(shared + order, kept);
    sort_and_take(experts, args.chosen, args.shares, rows, sorted,
                  [&](int64_t i, int64_t) { gemm.take(i, args.x + i * args.cols); }, worker);
    const int64_t width = AddShares::width, groups = (panel_count(args.out_cols) + group_panels - 1) / group_panels;
    const int64_t parts = (rows + shared_rows - 1) / shared_rows, part = (rows + parts - 1) / parts;
    const int64_t totals_bytes = part * width * static_cast<int64_t>(sizeof(float));
    char *own = worker.scratch<char>(totals_bytes + Gemm<AddShares>::work_bytes(rows_of_work(part)));
    float *totals = reinterpret_cast<float *>(own);
    gemm.work_in(own + totals_bytes);
    [[maybe_unused]] const typename Gemm<AddShares>::Registers registers;
    Chunks chunks(worker, groups * parts, 1);
    for (int64_t task, end; chunks.next(task, end);) {
        const int64_t group = task / parts, first = task % parts * part, last = first + part < rows ? first + part : rows;
        const int64_t column = group * width, left = args.out_cols - column;
        memset(totals, 0, totals_bytes);
        add_experts<Gemm, Weight>(gemm, args, panel_elements, sorted, group, first, last, totals);
        for (int64_t r = first; r < last; r++)
            args.store_row(totals + (r - first) * width, r, column, left < width ? left : width);
    }
}

}  // namespace
}  // namespace ISA
