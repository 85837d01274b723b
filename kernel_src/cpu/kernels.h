// The kernels of target `cpu`: their types and prototypes. Argument order is the contract with the
// generated glue: tensors first, then scalars, then the worker.
//
// Every thread of the team calls the same kernel with the same arguments and its own Worker; the
// kernel splits the work. No barrier is implied before or after: the caller puts one where data flows.
//
// Tensors are row-major and unpadded. `weight_panels` and `table_panels` are [N][K] matrices in the
// panel layout of panels.h, 64-byte aligned. Accumulation is f32; results are rounded to nearest even.
#pragma once

#include <cstdint>

#include "team.h"

using bf16 = uint16_t;

// Linked into one shared object with their caller: hidden symbols cannot be interposed by the process.
#pragma GCC visibility push(hidden)
extern "C" {

// out = bf16(bf16(x / sqrt(mean(x^2) + eps)) * weight); x, out [rows][cols], weight [cols].
void rms_norm(const bf16 *x, const bf16 *weight, bf16 *out, int64_t rows, int64_t cols, float eps,
              Worker &worker);

// out[rows][out_cols] = x[rows][cols] @ weight^T.
void gemm(const bf16 *x, const bf16 *weight_panels, bf16 *out, int64_t rows, int64_t cols,
          int64_t out_cols, Worker &worker);
// out = bf16(bf16(x @ weight^T) + residual); residual may be out.
void gemm_add(const bf16 *x, const bf16 *weight_panels, const bf16 *residual, bf16 *out, int64_t rows,
              int64_t cols, int64_t out_cols, Worker &worker);
// out = silu_and_mul(bf16(x @ gate^T), bf16(x @ up^T)).
void gemm_silu(const bf16 *x, const bf16 *gate_panels, const bf16 *up_panels, bf16 *out, int64_t rows,
               int64_t cols, int64_t out_cols, Worker &worker);

// The same for a single row: out[out_cols] = weight @ x[cols].
void gemv(const bf16 *weight_panels, const bf16 *x, bf16 *out, int64_t out_cols, int64_t cols,
          Worker &worker);
void gemv_f32(const bf16 *weight_panels, const bf16 *x, float *out, int64_t out_cols, int64_t cols,
              Worker &worker);
void gemv_add(const bf16 *weight_panels, const bf16 *x, const bf16 *residual, bf16 *out,
              int64_t out_cols, int64_t cols, Worker &worker);
void gemv_silu(const bf16 *gate_panels, const bf16 *up_panels, const bf16 *x, bf16 *out,
               int64_t out_cols, int64_t cols, Worker &worker);

// gemv_f32 for a weight [out_cols][cols] whose rows are whole.
void gemv_rows_f32(const bf16 *weight, const bf16 *x, float *out, int64_t out_cols, int64_t cols,
                   Worker &worker);

// Rotates the pairs (d, d + head_dim/2) of every head of row r by the angles of table row pos + r.
// x, out [rows][heads * head_dim], may be the same; table [max_position][head_dim] = cosines, sines.
void rope(const bf16 *x, const float *table, bf16 *out, int64_t rows, int64_t pos, int64_t heads,
          int64_t head_dim, Worker &worker);

// out = gate * sigmoid(gate) * up, elementwise over [rows][cols].
void silu_and_mul(const bf16 *gate, const bf16 *up, bf16 *out, int64_t rows, int64_t cols,
                  Worker &worker);

// out = a + b, elementwise over [rows][cols].
void add(const bf16 *a, const bf16 *b, bf16 *out, int64_t rows, int64_t cols, Worker &worker);

// A KV cache in panels, which attention streams without rearranging it. k_panels bf16 [P / 128][kv_heads]
// [128][head_dim], v_panels bf16 [P / 128][kv_heads][128][D]; P is the number of positions, padded to a
// multiple of 128, D is head_dim padded to a multiple of 16. The order within a block is in append_kv_panels.cc.
// Appends k, v [rows][kv_heads * head_dim] at positions pos, pos + 1 ..
void append_kv_panels(const bf16 *k, const bf16 *v, bf16 *k_panels, bf16 *v_panels, int64_t rows, int64_t pos,
                      int64_t kv_heads, int64_t head_dim, Worker &worker);
// Causal attention of rows pos .. pos + seq - 1 over positions 0 .. pos + seq - 1; q, out [seq][heads * head_dim].
void flash_attention_panels(const bf16 *q, const bf16 *k_panels, const bf16 *v_panels, bf16 *out, int64_t seq,
                            int64_t pos, int64_t heads, int64_t kv_heads, int64_t head_dim, Worker &worker);
// The same for the one row at position pos; contains a barrier.
void decode_attention_panels(const bf16 *q, const bf16 *k_panels, const bf16 *v_panels, bf16 *out, int64_t pos,
                             int64_t heads, int64_t kv_heads, int64_t head_dim, Worker &worker);

// The same over a cache in rows that keeps K and V of a head together, kv [>= pos + 1][kv_heads][2][head_dim].
void decode_attention_kv(const bf16 *q, const bf16 *kv, bf16 *out, int64_t pos, int64_t heads,
                         int64_t kv_heads, int64_t head_dim, Worker &worker);

// Puts one position's k, v [kv_heads * head_dim] into row pos of such a cache.
void append_kv(const bf16 *k, const bf16 *v, bf16 *kv, int64_t pos, int64_t kv_heads, int64_t head_dim,
               Worker &worker);

// out[r] = row tokens[r] of a row-major [vocab][cols] matrix; zeros for a token outside of the vocabulary.
void embed_rows(const int32_t *tokens, const bf16 *table, bf16 *out, int64_t rows, int64_t cols,
                int64_t vocab, Worker &worker);

// out[r] = row tokens[r] of the [vocab][cols] matrix; zeros for a token outside of the vocabulary.
void embed(const int32_t *tokens, const bf16 *table_panels, bf16 *out, int64_t rows, int64_t cols,
           int64_t vocab, Worker &worker);

}  // extern "C"
#pragma GCC visibility pop
