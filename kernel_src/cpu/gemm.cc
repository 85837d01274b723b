// x @ weight^T with an epilogue:
//   gemm       out = x @ weight^T
//   gemm_add   out = bf16(x @ weight^T) + residual; residual may be out
//   gemm_bias  out = x @ weight^T + bias, rounded once
//   gemm_f32   out = x @ weight^T, not rounded
//   gemm_qkv   q = x @ wq^T, k = x @ wk^T, v = x @ wv^T; with _bias plus bq, bk and bv
//   gemm_silu  out = silu_and_mul(bf16(x @ gate^T), bf16(x @ up^T)), with the activation of that number
// x bf16 [rows][cols], weights bf16 panels (panels.h) of [out_cols][cols], residual and out bf16 [rows][out_cols], for
// gemm_f32 f32, bias bf16 [out_cols].
// f32 accumulation in the order of columns, whatever the number of rows and threads.
#include "vec.h"
#include "epilogue.h"
#include "tile.h"
#include "gemm_core.h"

namespace ISA {

static void gemm(const bf16 *x, const bf16 *weight, const bf16 *bias, bf16 *out, int64_t rows, int64_t cols,
                 int64_t out_cols, Worker &worker) {
    const bf16 *weights[] = {weight};
    Gemm<StoreBf16>(x, weights, rows, cols, out_cols, {out, out_cols, bias}).run(worker);
}

static void gemm_qkv(const bf16 *x, const bf16 *wq, const bf16 *wk, const bf16 *wv, const bf16 *bq, const bf16 *bk,
                     const bf16 *bv, bf16 *q, bf16 *k, bf16 *v, int64_t rows, int64_t cols, int64_t q_cols, int64_t kv_cols,
                     Worker &worker) {
    gemm(x, wq, bq, q, rows, cols, q_cols, worker);
    gemm(x, wk, bk, k, rows, cols, kv_cols, worker);
    gemm(x, wv, bv, v, rows, cols, kv_cols, worker);
}

static void gemm_add(const bf16 *x, const bf16 *weight, const bf16 *residual, bf16 *out, int64_t rows,
                     int64_t cols, int64_t out_cols, Worker &worker) {
    const bf16 *weights[] = {weight};
    Gemm<AddResidual>(x, weights, rows, cols, out_cols, {residual, out, out_cols}).run(worker);
}

static void gemm_f32(const bf16 *x, const bf16 *weight, float *out, int64_t rows, int64_t cols, int64_t out_cols,
                     Worker &worker) {
    const bf16 *weights[] = {weight};
    Gemm<StoreF32>(x, weights, rows, cols, out_cols, {out, out_cols}).run(worker);
}

static void gemm_silu(const bf16 *x, const bf16 *gate, const bf16 *up, bf16 *out, int64_t rows,
                      int64_t cols, int64_t out_cols, int64_t activation, Worker &worker) {
    using Epilogue = SiluAndMul<tile_panels / 2 * panel_rows>;
    const bf16 *weights[] = {gate, up};
    Gemm<Epilogue>(x, weights, rows, cols, out_cols, {out, out_cols, activation}).run(worker);
}

}  // namespace ISA

KERNEL void gemm(const bf16 *x, const bf16 *weight_panels, bf16 *out, int64_t rows, int64_t cols,
                 int64_t out_cols, Worker &worker) {
    ISA::gemm(x, weight_panels, nullptr, out, rows, cols, out_cols, worker);
}

KERNEL void gemm_bias(const bf16 *x, const bf16 *weight_panels, const bf16 *bias, bf16 *out,
                      int64_t rows, int64_t cols, int64_t out_cols, Worker &worker) {
    ISA::gemm(x, weight_panels, bias, out, rows, cols, out_cols, worker);
}

KERNEL void gemm_qkv(const bf16 *x, const bf16 *wq_panels, const bf16 *wk_panels, const bf16 *wv_panels, bf16 *q, bf16 *k,
                     bf16 *v, int64_t rows, int64_t cols, int64_t q_cols, int64_t kv_cols, Worker &worker) {
    ISA::gemm_qkv(x, wq_panels, wk_panels, wv_panels, nullptr, nullptr, nullptr, q, k, v, rows, cols, q_cols, kv_cols, worker);
}

KERNEL void gemm_qkv_bias(const bf16 *x, const bf16 *wq_panels, const bf16 *wk_panels, const bf16 *wv_panels, const bf16 *bq,
                          const bf16 *bk, const bf16 *bv, bf16 *q, bf16 *k, bf16 *v, int64_t rows, int64_t cols,
                          int64_t q_cols, int64_t kv_cols, Worker &worker) {
    ISA::gemm_qkv(x, wq_panels, wk_panels, wv_panels, bq, bk, bv, q, k, v, rows, cols, q_cols, kv_cols, worker);
}

KERNEL void gemm_add(const bf16 *x, const bf16 *weight_panels, const bf16 *residual, bf16 *out,
                     int64_t rows, int64_t cols, int64_t out_cols, Worker &worker) {
    ISA::gemm_add(x, weight_panels, residual, out, rows, cols, out_cols, worker);
}

KERNEL void gemm_f32(const bf16 *x, const bf16 *weight_panels, float *out, int64_t rows, int64_t cols,
                     int64_t out_cols, Worker &worker) {
    ISA::gemm_f32(x, weight_panels, out, rows, cols, out_cols, worker);
}

KERNEL void gemm_silu(const bf16 *x, const bf16 *gate_panels, const bf16 *up_panels, bf16 *out,
                      int64_t rows, int64_t cols, int64_t out_cols, int64_t activation, Worker &worker) {
    ISA::gemm_silu(x, gate_panels, up_panels, out, rows, cols, out_cols, activation, worker);
}
