// The kernels of grouped_products.h and byte_products.h: for a format FORMAT and names NAMED(kernel), without the lookup where
// PRODUCTS_ALONE is defined. Included by those.
namespace ISA {

INLINE const uint8_t *bytes(const int8_t *stored) { return reinterpret_cast<const uint8_t *>(stored); }

static void gemm_bias(const bf16 *x, const int8_t *weight, const bf16 *bias, bf16 *out, int64_t rows, int64_t cols,
                      int64_t out_cols, Worker &worker) {
    const uint8_t *weights[] = {bytes(weight)};
    GroupedGemm<FORMAT, StoreBf16>(x, weights, rows, cols, out_cols, {out, out_cols, bias}).run(worker);
}

static void gemm(const bf16 *x, const int8_t *weight, bf16 *out, int64_t rows, int64_t cols, int64_t out_cols,
                 Worker &worker) {
    gemm_bias(x, weight, nullptr, out, rows, cols, out_cols, worker);
}

static void gemm_add(const bf16 *x, const int8_t *weight, const bf16 *residual, bf16 *out, int64_t rows, int64_t cols,
                     int64_t out_cols, Worker &worker) {
    const uint8_t *weights[] = {bytes(weight)};
    GroupedGemm<FORMAT, AddResidual>(x, weights, rows, cols, out_cols, {residual, out, out_cols}).run(worker);
}

static void gemm_qkv_bias(const bf16 *x, const int8_t *wq, const int8_t *wk, const int8_t *wv, const bf16 *bq, const bf16 *bk,
                          const bf16 *bv, bf16 *q, bf16 *k, bf16 *v, int64_t rows, int64_t cols, int64_t q_cols, int64_t kv_cols,
                          Worker &worker) {
    const uint8_t *weights[] = {bytes(wq), bytes(wk), bytes(wv)};
    const Joined::Result results[] = {{q, q_cols, bq}, {k, kv_cols, bk}, {v, kv_cols, bv}};
    each_of_qkv(weights, GroupedPanel<FORMAT>::size(cols), results, rows <= direct_rows<FORMAT>,
                [&](const uint8_t *const *some, int64_t out_cols, const StoreBf16 &epilogue) {
                    GroupedGemm<FORMAT, StoreBf16>(x, some, rows, cols, out_cols, epilogue).run(worker);
                });
}

static void gemm_qkv(const bf16 *x, const int8_t *wq, const int8_t *wk, const int8_t *wv, bf16 *q, bf16 *k, bf16 *v, int64_t rows,
                     int64_t cols, int64_t q_cols, int64_t kv_cols, Worker &worker) {
    gemm_qkv_bias(x, wq, wk, wv, nullptr, nullptr, nullptr, q, k, v, rows, cols, q_cols, kv_cols, worker);
}

static void gemm_f32(const bf16 *x, const int8_t *weight, float *out, int64_t rows, int64_t cols, int64_t out_cols,
                     Worker &worker) {
    const uint8_t *weights[] = {bytes(weight)};
    GroupedGemm<FORMAT, StoreF32>(x, weights, rows, cols, out_cols, {out, out_cols}).run(worker);
}

static void gemm_silu(const bf16 *x, const int8_t *gate, const int8_t *up, bf16 *out, int64_t rows, int64_t cols,
                      int64_t out_cols, int64_t activation, Worker &worker) {
    using Epilogue = SiluAndMul<group_panels / 2 * panel_rows>;
    const uint8_t *weights[] = {bytes(gate), bytes(up)};
    GroupedGemm<FORMAT, Epilogue>(x, weights, rows, cols, out_cols, {out, out_cols, activation}).run(worker);
}

#if !ISA_AMX
static void gemv_bias(const int8_t *weight, const bf16 *x, const bf16 *bias, bf16 *out, int64_t out_cols, int64_t cols,
                      Worker &worker) {
    const uint8_t *weights[] = {bytes(weight)};
    GroupedGemv<FORMAT, StoreBf16>(weights, out_cols, cols, {out, out_cols, bias}).run(x, worker);
}

static void gemv(const int8_t *weight, const bf16 *x, bf16 *out, int64_t out_cols, int64_t cols, Worker &worker) {
    gemv_bias(weight, x, nullptr, out, out_cols, cols, worker);
}

static void gemv_qkv_bias(const int8_t *wq, const int8_t *wk, const int8_t *wv, const bf16 *x, const bf16 *bq, const bf16 *bk,
                          const bf16 *bv, bf16 *q, bf16 *k, bf16 *v, int64_t q_cols, int64_t kv_cols, int64_t cols, Worker &worker) {
    const uint8_t *weights[] = {bytes(wq), bytes(wk), bytes(wv)};
    const Joined::Result results[] = {{q, q_cols, bq}, {k, kv_cols, bk}, {v, kv_cols, bv}};
    each_of_qkv(weights, GroupedPanel<FORMAT>::size(cols), results, true,
                [&](const uint8_t *const *some, int64_t out_cols, const StoreBf16 &epilogue) {
                    GroupedGemv<FORMAT, StoreBf16>(some, out_cols, cols, epilogue).run(x, worker);
                });
}

static void gemv_qkv(const int8_t *wq, const int8_t *wk, const int8_t *wv, const bf16 *x, bf16 *q, bf16 *k, bf16 *v, int64_t q_cols,
                     int64_t kv_cols, int64_t cols, Worker &worker) {
    gemv_qkv_bias(wq, wk, wv, x, nullptr, nullptr, nullptr, q, k, v, q_cols, kv_cols, cols, worker);
}

static void gemv_f32(const int8_t *weight, const bf16 *x, float *out, int64_t out_cols, int64_t cols, Worker &worker) {
    const uint8_t *weights[] = {bytes(weight)};
    GroupedGemv<FORMAT, StoreF32>(weights, out_cols, cols, {out, out_cols}).run(x, worker);
}

static void gemv_add(const int8_t *weight, const bf16 *x, const bf16 *residual, bf16 *out, int64_t out_cols,
                     int64_t cols, Worker &worker) {
    const uint8_t *weights[] = {bytes(weight)};
    GroupedGemv<FORMAT, AddResidual>(weights, out_cols, cols, {residual, out, out_cols}).run(x, worker);
}

static void gemv_silu(const int8_t *gate, const int8_t *up, const bf16 *x, bf16 *out, int64_t out_cols, int64_t cols,
                      int64_t activation, Worker &worker) {
    const uint8_t *weights[] = {bytes(gate), bytes(up)};
    GroupedGemv<FORMAT, SiluAndMul<panel_rows>>(weights, out_cols, cols, {out, out_cols, activation}).run(x, worker);
}

#if !defined(PRODUCTS_ALONE)
// The row of a token, widened and rounded to bf16, then scaled; zeros for a token outside of the vocabulary.
static void embed(const int32_t *tokens, const int8_t *table, bf16 *out, int64_t rows, int64_t cols, int64_t vocab,
                  float scale, Worker &worker) {
    const int64_t size = GroupedPanel<FORMAT>::size(cols), groups = group_count<FORMAT>(cols);
    Chunks chunks(worker, rows * groups, 16);
    for (int64_t at, end; chunks.next(at, end);)
        for (; at < end; at++) {
            const int64_t row = at / groups, group = at % groups, token = tokens[row], first = group * FORMAT::inputs;
            const int64_t count = cols - first < FORMAT::inputs ? cols - first : FORMAT::inputs;
            if (token >= 0 && token < vocab)
                widen_row<FORMAT>(bytes(table) + token / panel_rows * size, group, token % panel_rows,
                                  out + row * cols + first, count);
            else
                memset(out + row * cols + first, 0, count * sizeof(bf16));
            scale_row(out + row * cols + first, count, scale);
        }
}
#endif
#endif

}  // namespace ISA

#if ISA_AMX
// What tiles do not multiply is the same code as without them, and of few rows tiles take longer. Both make the same bits.
#define OF_VECTORS(kernel) KERNEL decltype(NAMED(kernel)) NAMED(kernel##_avx512bf16);
OF_VECTORS(gemm)
OF_VECTORS(gemm_bias)
OF_VECTORS(gemm_qkv)
OF_VECTORS(gemm_qkv_bias)
OF_VECTORS(gemm_add)
OF_VECTORS(gemm_silu)
OF_VECTORS(gemm_f32)
OF_VECTORS(gemv)
OF_VECTORS(gemv_bias)
OF_VECTORS(gemv_qkv)
OF_VECTORS(gemv_qkv_bias)
OF_VECTORS(gemv_f32)
OF_VECTORS(gemv_add)
OF_VECTORS(gemv_silu)
#if !defined(PRODUCTS_ALONE)
OF_VECTORS(embed)
#endif
#define BY_VECTORS(kernel, ...) NAMED(kernel##_avx512bf16)(__VA_ARGS__)
#define BY_TILES(kernel, ...)                                    \
    if (rows <= 8) return BY_VECTORS(kernel, __VA_ARGS__); \
    ISA::kernel(__VA_ARGS__)
#else
#define BY_VECTORS(kernel, ...) ISA::kernel(__VA_ARGS__)
#define BY_TILES BY_VECTORS
#endif

KERNEL void NAMED(gemm)(const bf16 *x, const int8_t *weight, bf16 *out, int64_t rows, int64_t cols, int64_t out_cols,
                        Worker &worker) {
    BY_TILES(gemm, x, weight, out, rows, cols, out_cols, worker);
}

KERNEL void NAMED(gemm_bias)(const bf16 *x, const int8_t *weight, const bf16 *bias, bf16 *out, int64_t rows,
                             int64_t cols, int64_t out_cols, Worker &worker) {
    BY_TILES(gemm_bias, x, weight, bias, out, rows, cols, out_cols, worker);
}

KERNEL void NAMED(gemm_qkv)(const bf16 *x, const int8_t *wq, const int8_t *wk, const int8_t *wv, bf16 *q, bf16 *k, bf16 *v,
                            int64_t rows, int64_t cols, int64_t q_cols, int64_t kv_cols, Worker &worker) {
    BY_TILES(gemm_qkv, x, wq, wk, wv, q, k, v, rows, cols, q_cols, kv_cols, worker);
}

KERNEL void NAMED(gemm_qkv_bias)(const bf16 *x, const int8_t *wq, const int8_t *wk, const int8_t *wv, const bf16 *bq,
                                 const bf16 *bk, const bf16 *bv, bf16 *q, bf16 *k, bf16 *v, int64_t rows, int64_t cols,
                                 int64_t q_cols, int64_t kv_cols, Worker &worker) {
    BY_TILES(gemm_qkv_bias, x, wq, wk, wv, bq, bk, bv, q, k, v, rows, cols, q_cols, kv_cols, worker);
}

KERNEL void NAMED(gemm_add)(const bf16 *x, const int8_t *weight, const bf16 *residual, bf16 *out, int64_t rows,
                            int64_t cols, int64_t out_cols, Worker &worker) {
    BY_TILES(gemm_add, x, weight, residual, out, rows, cols, out_cols, worker);
}

KERNEL void NAMED(gemm_silu)(const bf16 *x, const int8_t *gate, const int8_t *up, bf16 *out, int64_t rows,
                             int64_t cols, int64_t out_cols, int64_t activation, Worker &worker) {
    BY_TILES(gemm_silu, x, gate, up, out, rows, cols, out_cols, activation, worker);
}

KERNEL void NAMED(gemm_f32)(const bf16 *x, const int8_t *weight, float *out, int64_t rows, int64_t cols, int64_t out_cols,
                            Worker &worker) {
    BY_TILES(gemm_f32, x, weight, out, rows, cols, out_cols, worker);
}

KERNEL void NAMED(gemv)(const int8_t *weight, const bf16 *x, bf16 *out, int64_t out_cols, int64_t cols,
                        Worker &worker) {
    BY_VECTORS(gemv, weight, x, out, out_cols, cols, worker);
}

KERNEL void NAMED(gemv_bias)(const int8_t *weight, const bf16 *x, const bf16 *bias, bf16 *out, int64_t out_cols,
                             int64_t cols, Worker &worker) {
    BY_VECTORS(gemv_bias, weight, x, bias, out, out_cols, cols, worker);
}

KERNEL void NAMED(gemv_qkv)(const int8_t *wq, const int8_t *wk, const int8_t *wv, const bf16 *x, bf16 *q, bf16 *k, bf16 *v,
                            int64_t q_cols, int64_t kv_cols, int64_t cols, Worker &worker) {
    BY_VECTORS(gemv_qkv, wq, wk, wv, x, q, k, v, q_cols, kv_cols, cols, worker);
}

KERNEL void NAMED(gemv_qkv_bias)(const int8_t *wq, const int8_t *wk, const int8_t *wv, const bf16 *x, const bf16 *bq,
                                 const bf16 *bk, const bf16 *bv, bf16 *q, bf16 *k, bf16 *v, int64_t q_cols, int64_t kv_cols,
                                 int64_t cols, Worker &worker) {
    BY_VECTORS(gemv_qkv_bias, wq, wk, wv, x, bq, bk, bv, q, k, v, q_cols, kv_cols, cols, worker);
}

KERNEL void NAMED(gemv_f32)(const int8_t *weight, const bf16 *x, float *out, int64_t out_cols, int64_t cols,
                            Worker &worker) {
    BY_VECTORS(gemv_f32, weight, x, out, out_cols, cols, worker);
}

KERNEL void NAMED(gemv_add)(const int8_t *weight, const bf16 *x, const bf16 *residual, bf16 *out, int64_t out_cols,
                            int64_t cols, Worker &worker) {
    BY_VECTORS(gemv_add, weight, x, residual, out, out_cols, cols, worker);
}

KERNEL void NAMED(gemv_silu)(const int8_t *gate, const int8_t *up, const bf16 *x, bf16 *out, int64_t out_cols,
                             int64_t cols, int64_t activation, Worker &worker) {
    BY_VECTORS(gemv_silu, gate, up, x, out, out_cols, cols, activation, worker);
}

#if !defined(PRODUCTS_ALONE)
KERNEL void NAMED(embed)(const int32_t *tokens, const int8_t *table, bf16 *out, int64_t rows, int64_t cols,
                         int64_t vocab, float scale, Worker &worker) {
    BY_VECTORS(embed, tokens, table, out, rows, cols, vocab, scale, worker);
}
#endif
