// weight @ x for a single row x, with an epilogue:
//   gemv       out = weight @ x
//   gemv_f32   the same, not rounded
//   gemv_add   out = bf16(weight @ x) + residual; residual may be out
//   gemv_bias  out = weight @ x + bias, rounded once
//   gemv_qkv   q = wq @ x, k = wk @ x, v = wv @ x; with _bias plus bq, bk and bv
//   gemv_silu  out = silu_and_mul(bf16(gate @ x), bf16(up @ x)), with the activation of that number
// weights bf16 panels (panels.h) of [out_cols][cols], x bf16 [cols], residual and bias bf16 [out_cols], out bf16, for gemv_f32
// f32 [out_cols].
// Bound by memory: each panel is read once, front to back, by one thread.
#include "vec.h"
#include "epilogue.h"
#include "operand.h"
#include "streams.h"
#include "gemv_core.h"

namespace ISA {

static void gemv(const bf16 *weight, const bf16 *x, const bf16 *bias, bf16 *out, int64_t out_cols, int64_t cols,
                 Worker &worker) {
    const bf16 *weights[] = {weight};
    gemv_panels(weights, x, out_cols, cols, StoreBf16{out, out_cols, bias}, worker);
}

static void gemv_qkv(const bf16 *wq, const bf16 *wk, const bf16 *wv, const bf16 *x, const bf16 *bq, const bf16 *bk, const bf16 *bv,
                     bf16 *q, bf16 *k, bf16 *v, int64_t q_cols, int64_t kv_cols, int64_t cols, Worker &worker) {
    const bf16 *weights[] = {wq, wk, wv};
    const Joined::Result results[] = {{q, q_cols, bq}, {k, kv_cols, bk}, {v, kv_cols, bv}};
    each_of_qkv(weights, panel_size(cols), results, true, [&](const bf16 *const *some, int64_t out_cols, const StoreBf16 &epilogue) {
        gemv_panels(some, x, out_cols, cols, epilogue, worker);
    });
}

static void gemv_f32(const bf16 *weight, const bf16 *x, float *out, int64_t out_cols, int64_t cols,
                     Worker &worker) {
    const bf16 *weights[] = {weight};
    gemv_panels(weights, x, out_cols, cols, StoreF32{out, out_cols}, worker);
}

static void gemv_add(const bf16 *weight, const bf16 *x, const bf16 *residual, bf16 *out,
                     int64_t out_cols, int64_t cols, Worker &worker) {
    const bf16 *weights[] = {weight};
    gemv_panels(weights, x, out_cols, cols, AddResidual{residual, out, out_cols}, worker);
}

static void gemv_silu(const bf16 *gate, const bf16 *up, const bf16 *x, bf16 *out, int64_t out_cols,
                      int64_t cols, int64_t activation, Worker &worker) {
    const bf16 *weights[] = {gate, up};
    gemv_panels(weights, x, out_cols, cols, SiluAndMul<panel_rows>{out, out_cols, activation}, worker);
}

}  // namespace ISA

KERNEL void gemv(const bf16 *weight_panels, const bf16 *x, bf16 *out, int64_t out_cols, int64_t cols,
                 Worker &worker) {
    ISA::gemv(weight_panels, x, nullptr, out, out_cols, cols, worker);
}

KERNEL void gemv_bias(const bf16 *weight_panels, const bf16 *x, const bf16 *bias, bf16 *out,
                      int64_t out_cols, int64_t cols, Worker &worker) {
    ISA::gemv(weight_panels, x, bias, out, out_cols, cols, worker);
}

KERNEL void gemv_qkv(const bf16 *wq_panels, const bf16 *wk_panels, const bf16 *wv_panels, const bf16 *x, bf16 *q, bf16 *k,
                     bf16 *v, int64_t q_cols, int64_t kv_cols, int64_t cols, Worker &worker) {
    ISA::gemv_qkv(wq_panels, wk_panels, wv_panels, x, nullptr, nullptr, nullptr, q, k, v, q_cols, kv_cols, cols, worker);
}

KERNEL void gemv_qkv_bias(const bf16 *wq_panels, const bf16 *wk_panels, const bf16 *wv_panels, const bf16 *x, const bf16 *bq,
                          const bf16 *bk, const bf16 *bv, bf16 *q, bf16 *k, bf16 *v, int64_t q_cols, int64_t kv_cols,
                          int64_t cols, Worker &worker) {
    ISA::gemv_qkv(wq_panels, wk_panels, wv_panels, x, bq, bk, bv, q, k, v, q_cols, kv_cols, cols, worker);
}

KERNEL void gemv_f32(const bf16 *weight_panels, const bf16 *x, float *out, int64_t out_cols,
                     int64_t cols, Worker &worker) {
    ISA::gemv_f32(weight_panels, x, out, out_cols, cols, worker);
}

KERNEL void gemv_add(const bf16 *weight_panels, const bf16 *x, const bf16 *residual, bf16 *out,
                     int64_t out_cols, int64_t cols, Worker &worker) {
    ISA::gemv_add(weight_panels, x, residual, out, out_cols, cols, worker);
}

KERNEL void gemv_silu(const bf16 *gate_panels, const bf16 *up_panels, const bf16 *x, bf16 *out,
                      int64_t out_cols, int64_t cols, int64_t activation, Worker &worker) {
    ISA::gemv_silu(gate_panels, up_panels, x, out, out_cols, cols, activation, worker);
}
