// A token's experts (experts.h). Only the weights of those that it takes are read, at the bandwidth of memory. Included inside
// each instruction set.
//
// A Vector is x as a format's products take it:
//   static int64_t bytes(int64_t cols)                          the memory that it needs
//   static Vector take(const bf16 *x, int64_t cols, uint8_t *)  x in that memory
//   static int64_t panel_elements(int64_t cols)
//   static void with_streams(int64_t cols, run)                 calls run(Panels): how many panels are read at a time
//   static constexpr bool paired                                whether gate and up are two streams where those are two
//   void times<Panels>(first, size, sums, after)                sums[panels][panel_rows] of panels `size` elements apart
namespace ISA {
namespace {

struct PlainVector {
    using Weight = bf16;
    static constexpr bool paired = false;
    const Operand *x;
    int64_t cols;

    static int64_t bytes(int64_t cols) { return ((cols + 1) * static_cast<int64_t>(sizeof(Operand)) + 63) / 64 * 64; }
    static int64_t panel_elements(int64_t cols) { return panel_size(cols); }

    static PlainVector take(const bf16 *x, int64_t cols, uint8_t *memory) {
        return {prepare(x, cols, cols + cols % 2, reinterpret_cast<Operand *>(memory)), cols};
    }

    template <class Run>
    INLINE void with_streams(int64_t, const Run &run) { ISA::with_streams<most_streams>(run); }

    template <class Some>
    INLINE_MEMBER void times(const bf16 *first, int64_t size, float *sums, const After<bf16> &after) const {
        panels_times_vector<Some>(first, size, x, pair_count(cols), sums, after);
    }
};

// As many panels as are worth the handing out, of an expert that others follow: all threads take their share of it.
INLINE int64_t expert_chunk(const Worker &worker, int64_t panels) {
    const int64_t share = (panels + worker.threads - 1) / worker.threads;
    return share < kept_panels ? share : kept_panels;
}

// The first matrix's panels of a turn and then the second's, or both at once.
template <class Vector, class Some>
INLINE void times_both(const Vector &x, const typename Vector::Weight *const *weights, int64_t size, Turn &turn,
                       float (*sums)[Some::value * panel_rows]) {
    using Weight = typename Vector::Weight;
    if constexpr (Vector::paired && Some::value == 1)
        x.template times<Panels<2>>(weights[0] + turn.panel * size, weights[1] - weights[0], sums[0],
                                    after_turn(weights[0], size, turn));
    else
        each_weight<2>(weights, size, turn, [&](int64_t w, const Weight *own, const After<Weight> &after) {
            x.template times<Some>(own, size * turn.apart, sums[w], after);
        });
}

template <class Vector, class Streams>
void gate_and_up_of_token(const GateAndUp<typename Vector::Weight> &args, Worker &worker) {
    using Weight = typename Vector::Weight;
    const int64_t size = Vector::panel_elements(args.cols), panels = panel_count(args.out_cols);
    uint8_t *memory = worker.scratch<uint8_t>(Vector::bytes(args.cols));
    Vector x = {};
    for (int64_t j = 0; j < args.experts.top; j++) {
        const int64_t id = args.experts.id(args.chosen, j), share = expert_chunk(worker, panels);
        const Weight *weights[] = {args.gate + id * panels * size, args.up + id * panels * size};
        const auto epilogue = args.template epilogue<panel_rows>(id, j);
        Chunks chunks(worker, panels, share, j + 1 < args.experts.top ? share : Streams::value);
        each_panels<std::conditional_t<Vector::paired && Streams::value == 2, Panels<1>, Streams>>(
            chunks, epilogue,
            [&] { if (x.cols == 0) x = Vector::take(args.x, args.cols, memory); },
            [&](auto some, Turn &turn, const auto &keeping) {
                float sums[2][some.value * panel_rows];
                times_both<Vector, decltype(some)>(x, weights, size, turn, sums);
                finish_panels<some.value>(keeping, turn.panel, turn.apart, args.out_cols, sums);
            });
    }
}

template <class Vector>
void gate_and_up_of_token(const GateAndUp<typename Vector::Weight> &args, Worker &worker) {
    Vector::with_streams(args.cols, [&](auto streams) { gate_and_up_of_token<Vector, decltype(streams)>(args, worker); });
}

// totals f32 [kept_panels][panel_rows] of the chunk's panels from `first` on += the product of one expert.
template <class Vector, class Streams>
INLINE void add_expert(const SharedDown<typename Vector::Weight> &args, const Vector &x, int64_t j, const typename Vector::Weight *weight,
                       const typename Vector::Weight *next, int64_t first, Turn &turn, float *totals) {
    using Weight = typename Vector::Weight;
    const int64_t size = Vector::panel_elements(args.cols), id = args.experts.id(args.chosen, j);
    const bf16 *bias = bias_of(args.bias, id, args.out_cols);
    run_panels<Streams>(turn, first, [&](auto some) {
        float sums[some.value * panel_rows];
        After<Weight> after = after_turn(weight, size, turn);
        if (after.known == nullptr) after.known = next;
        x.template times<decltype(some)>(weight + turn.panel * size, size * turn.apart, sums, after);
        for (int64_t p = 0; p < some.value; p++) {
            const int64_t panel = turn.panel + p * turn.apart, column = panel * panel_rows, left = args.out_cols - column;
            add_share(totals + (panel - first) * panel_rows, sums + p * panel_rows, args.shares[j], bias, column,
                      left < panel_rows ? left : panel_rows);
        }
    });
}

// x: rows of the chosen experts, one after the other.
template <class Vector, class Streams>
void down_of_token(const SharedDown<typename Vector::Weight> &args, Worker &worker) {
    using Weight = typename Vector::Weight;
    const int64_t top = args.experts.top, size = Vector::panel_elements(args.cols), panels = panel_count(args.out_cols);
    const int64_t bytes = Vector::bytes(args.cols);
    uint8_t *memory = worker.scratch<uint8_t>(top * (bytes + static_cast<int64_t>(sizeof(Vector))));
    Vector *x = reinterpret_cast<Vector *>(memory + top * bytes);
    const auto weight = [&](int64_t j) { return args.weight + args.experts.id(args.chosen, j) * panels * size; };
    Chunks chunks = panel_chunks(worker, panels, Streams::value, size * static_cast<int64_t>(sizeof(Weight)) * top);
    Turn turn = {chunks};
    turn.take();
    for (int64_t j = 0; turn.more && j < top; j++) x[j] = Vector::take(args.x + j * args.cols, args.cols, memory + j * bytes);
    alignas(line_bytes) float totals[kept_panels * panel_rows];
    while (turn.more) {
        const int64_t first = turn.next, end = turn.next_end, column = first * panel_rows, left = args.out_cols - column;
        turn.end = end;
        for (int64_t i = 0; i < (end - first) * panel_rows; i++) totals[i] = 0;
        for (int64_t j = 0; j < top; j++)
            add_expert<Vector, Streams>(args, x[j], j, weight(j), j + 1 < top ? weight(j + 1) + first * size : nullptr, first,
                                        turn, totals);
        args.store_row(totals, 0, column, left < (end - first) * panel_rows ? left : (end - first) * panel_rows);
    }
}

template <class Vector>
void down_of_token(const SharedDown<typename Vector::Weight> &args, Worker &worker) {
    Vector::with_streams(args.cols, [&](auto streams) { down_of_token<Vector, decltype(streams)>(args, worker); });
}

}  // namespace
}  // namespace ISA
