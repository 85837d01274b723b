// A few rows of x times panels of grouped weights (grouped.h), with an epilogue (epilogue.h). Included inside each instruction
// set; for those that have vectors of 8 or more.
//
// Weights are multiplied as they lie, as a vector is (grouped_gemv.h): widening them would take longer than so few rows. Panels
// are read in the same long streams, and each block of them, which is in L1 then, is multiplied with all rows.
namespace ISA {
namespace {

// How many rows are at most multiplied in this way.
template <class Format>
constexpr int64_t direct_rows = ISA_AMX || ISA_LANES < 8 ? 0 : ISA_LANES == 16 ? 16 : Format::direct_rows;

template <class Format, class Epilogue>
class GroupedRows;

#if ISA_LANES >= 8 && !ISA_AMX

// Of a tile: as many rows and panels as leave their sums in registers.
constexpr int64_t few_tile_rows = 4;
constexpr int few_tile_panels = ISA_LANES == 16 ? 2 : 1;

// Lines are asked for twice: into L2 so many bytes before they are read, and into L1 a few groups before. A core has fewer requests
// into L1 than memory needs at a time, and arithmetic takes too long for loads to run ahead by themselves.
constexpr int64_t far_bytes = 16384;
struct FewPanels : Panels<few_tile_panels> {
    static constexpr int soon = ISA_LANES == 16 ? 4 : 0;
};

// Whether lines are asked for into L2, too. Where a line has one quad and meets two rows, the machine's own requests run far enough
// ahead, and ours would take their places.
template <class Format>
INLINE bool asks_into_l2(int64_t rows) {
    constexpr bool one_quad = Format::number_bytes >= Format::inputs / quad * line_bytes;
    return ISA_LANES != 16 || !reads_ahead || !one_quad || rows > 2;
}

// What tiles ask for with the lines that they read: what lies `ahead` bytes from there. Where `turns` tiles read the same lines,
// each asks with those of its share of the groups, so that requests come evenly.
struct Requests {
    int64_t ahead;
    uint32_t turn, turns;

    INLINE_MEMBER int64_t of_group(int64_t group) const { return static_cast<uint32_t>(group) % turns == turn ? ahead : 0; }
};

// Sums of one row and the panels that are read at a time: of products, and of minima with x.
struct FewSums {
    static constexpr int64_t panels = 2;
    alignas(line_bytes) float products[panels * panel_rows], minima[panels * panel_rows];
};

// sums[r] += the share of groups `group` to `until` - 1, whole blocks of x but for the last, of panels `size` bytes apart, for r < R;
// those of the first panel are `at` numbers into a row's.
template <class Format, int R>
void few_rows_tile(const uint8_t *panel, int64_t size, const Requests &requests, int64_t group, int64_t until, const RowsOf<Format> &x,
                   FewSums *sums, int64_t at) {
    using Panel = GroupedPanel<Format>;
    constexpr int64_t V = few_tile_panels * sum_vectors, block_groups = fixed_inputs / Format::inputs;
    while (group < until) {
        const int64_t from = group, block = from / block_groups, end = from + block_groups < until ? from + block_groups : until;
        f32v total[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int64_t v = 0; v < V; v++) total[r][v] = begin_block<Format>(sums[r].products + at + v * lanes);
        for (; group < end; group++) {
            i32v sum[R * V];
            const int64_t ahead = requests.of_group(group);
            prefetch_scales<Format, FewPanels>(panel + ahead, size, group);
            sums_of_group<Format, FewPanels, R>(x, group, Panel::numbers(panel, group), size, ahead, sum);
#pragma GCC unroll 8
            for (int64_t v = 0; v < V; v++) {
                const PanelScales<Format> scales(panel, size, group, v);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
                    total[r][v] = add_group<Format>(total[r][v], sum[r * V + v], x.row(r), group, scales.own, scales.output);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int64_t v = 0; v < V; v++) end_block<Format>(sums[r].products + at + v * lanes, total[r][v], x.row(r), block);
        if constexpr (Format::has_minimum) {
            const uint8_t *panels[few_tile_panels];
            f32v least[R][V];
            for (int64_t p = 0; p < few_tile_panels; p++) panels[p] = panel + p * size;
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                for (int64_t v = 0; v < V; v++) least[r][v] = load<f32v>(sums[r].minima + at + v * lanes);
            add_minima<Format, R, V>(panels, {fixed_of(x.first), x.bytes}, from, end, least);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                for (int64_t v = 0; v < V; v++) store(sums[r].minima + at + v * lanes, least[r][v]);
        }
    }
}

template <class Format, class Epilogue>
class GroupedRows {
public:
    GroupedRows(const bf16 *x, const uint8_t *const *weights, int64_t rows, const SizeOf<Format> &size, int64_t out_cols,
                const Epilogue &epilogue)
        : x_(x), weights_(weights), rows_(rows), size_(size), out_cols_(out_cols), epilogue_(epilogue) {}

    void run(Worker &worker) {
        fix(worker);
        Chunks chunks = panel_chunks(worker, panel_count(out_cols_), Streams::value, panel_bytes_ * Epilogue::weights);
        each_turn<Streams>(chunks, joined_by(epilogue_), [&](auto some, Turn &turn) { multiply<decltype(some)>(turn); });
    }

private:
    using Panel = GroupedPanel<Format>;
    // Two panels are read at a time: of one weight, or of two, for the same outputs.
    using Streams = Panels<FewSums::panels / Epilogue::weights>;
    static constexpr int64_t block_groups = fixed_inputs / Format::inputs;
    static constexpr int64_t block_bytes = block_groups / Panel::block_groups * Panel::block;
    static constexpr int64_t far_blocks = (far_bytes + block_bytes - 1) / block_bytes;

    void fix(Worker &worker) {
        fixed_ = worker.shared_scratch<uint8_t>(rows_ * size_.bytes());
        {
            Chunks chunks(worker, rows_, 8, 1);
            for (int64_t row, end; chunks.next(row, end);)
                for (; row < end; row++) take(x_ + row * size_.cols, taken(row));
        }
        worker.barrier();
    }

    // AVX2 multiplies several rows in pairs of 16 bits.
    void take(const bf16 *x, const RowOf<Format> &row) const {
        if constexpr (takes_bytes<Format> || ISA_LANES == 16) take_row<Format>(x, size_, row);
        else fix_for<Format>(x, size_, row);
    }

    RowOf<Format> taken(int64_t row) const { return size_.at(fixed_ + row * size_.bytes()); }

    // A panel of each stream. One that has no other beside it is multiplied twice by tiles of two, and the result dropped.
    template <class Some>
    void multiply(Turn &turn) {
        constexpr int64_t count = Some::value * Epilogue::weights;
        const int64_t groups = group_count<Format>(size_.cols), blocks = (groups + block_groups - 1) / block_groups;
        const int64_t last = far_blocks < blocks ? (blocks - far_blocks) * block_groups : 0;
        const uint8_t *first = weights_[0] + turn.place(turn.panel, panel_bytes_);
        const int64_t apart = count == 1 ? 0 : Epilogue::weights > 1 ? weights_[1] - weights_[0] : turn.apart * panel_bytes_;
        FewSums sums[direct_rows<Format>];
        memset(sums, 0, rows_ * sizeof *sums);
        for (int64_t p = 0; p < Some::value; p++) expect(turn.panel + p * turn.apart);
        multiply_groups<count>(first, apart, 0, last, Panel::offset(far_blocks * block_groups) - Panel::offset(0), sums);
        const int64_t next = after_turn(weights_[0], panel_bytes_, turn).distance(first);
        multiply_groups<count>(first, apart, last, groups, next == 0 ? 0 : next + Panel::offset(0) - Panel::offset(last), sums);
        for (int64_t p = 0; p < Some::value; p++) finish(turn, turn.panel + p * turn.apart, p, sums);
    }

    // Groups `from` to `until` - 1 of all rows and panels, and asks for what lies `ahead` bytes further. What several tiles read is read
    // a block at a time, which stays in L1.
    template <int64_t count>
    void multiply_groups(const uint8_t *first, int64_t apart, int64_t from, int64_t until, int64_t ahead, FewSums *sums) const {
        const Steps steps = {rows_, few_tile_rows};
        const int64_t most = steps.count == 1 && count <= few_tile_panels ? until : block_groups;
        if (!asks_into_l2<Format>(rows_)) ahead = 0;
        for (int64_t end; from < until; from = end) {
            end = from + most < until ? from + most : until;
            for (int64_t p = 0; p < count; p += few_tile_panels)
                for (int64_t step = 0; step < steps.count; step++) {
                    const int64_t row = steps.first(step);
                    const Requests requests = {ahead, static_cast<uint32_t>(step), static_cast<uint32_t>(steps.count)};
                    with_rows(steps.first(step + 1) - row, [&](auto known) {
                        if constexpr (known.count <= few_tile_rows)
                            few_rows_tile<Format, known.count>(first + p * apart, apart, requests, from, end,
                                                               {taken(row), size_.bytes()}, sums + row, p * panel_rows);
                    });
                }
        }
    }

    void expect(int64_t panel) const {
        for (int64_t r = 0; r < rows_; r++) expect_row(epilogue_, r, panel * panel_rows, panel_outputs(panel, out_cols_));
    }

    // Output panel `panel`, whose sums are those of stream p, or of all streams where each is of a weight.
    void finish(const Turn &turn, int64_t panel, int64_t p, FewSums *sums) {
        for (int64_t r = 0; r < rows_; r++) {
            alignas(line_bytes) float line[group_panels * panel_rows];
            for (int64_t w = 0; w < Epilogue::weights; w++) {
                float *own = sums[r].products + (p + w) * panel_rows;
                finish_sums<Format>(weights_[w] + turn.place(panel, panel_bytes_), own, sums[r].minima + (p + w) * panel_rows);
                memcpy(line + w * PanelGroups<uint8_t, Epilogue>::columns, own, panel_rows * sizeof *own);
            }
            finish_panel(epilogue_, panel, out_cols_, line, r);
        }
    }

    const bf16 *x_;
    const uint8_t *const *weights_;
    int64_t rows_;
    SizeOf<Format> size_;
    int64_t out_cols_, panel_bytes_ = GroupedPanel<Format>::size(size_.cols);
    Epilogue epilogue_;
    uint8_t *fixed_ = nullptr;
};

#endif

}  // namespace
}  // namespace ISA
