// The kernels of experts (experts.h) with weights of one format. A file for a format defines, in namespace ISA, Vector
// (expert_gemv.h), Product<Epilogue>, the product of a matrix (gemm_core.h), and Stored, the type of weights in signatures;
// and NAMED(kernel), the kernel's name after the format's. Then it includes this.
//   moe_gemv_silu  out bf16 [top][out_cols] = gated activation of what gate and up of each chosen expert make of x bf16 [cols]
//   moe_gemv       out bf16 [out_cols] = sum of what the chosen experts make of their rows x bf16 [top][cols], by shares
//   moe_gemm_silu  the same of x bf16 [rows][cols]: out has a row for each choice, by experts and then by rows
//   moe_gemm       and the sum of such rows, for each of the prompt's
// chosen i32 and shares f32 [rows][top]; weights [experts][out_cols][cols] in panels, each expert's whole. With _bias, products
// have biases bf16 [experts][out_cols] before they are rounded or summed; with _add, residual is added to the rounded sum.
namespace ISA {

INLINE const Vector::Weight *panels_of(const Stored *stored) { return reinterpret_cast<const Vector::Weight *>(stored); }

// Not static: tiles leave some calls to the code of another instruction set.
#define HIDDEN __attribute__((visibility("hidden")))

HIDDEN void NAMED(gate_and_up)(const bf16 *x, const int32_t *chosen, const Stored *gate, const Stored *up, const bf16 *gate_bias,
                               const bf16 *up_bias, bf16 *out, int64_t rows, int64_t cols, int64_t out_cols, int64_t experts,
                               int64_t top, int64_t activation, Worker &worker) {
    const GateAndUp<Vector::Weight> args = {x, chosen, panels_of(gate), panels_of(up), gate_bias, up_bias, out,
                                            cols, out_cols, {experts, top}, activation};
#if !ISA_AMX
    if (rows == 0) return gate_and_up_of_token<Vector>(args, worker);
#endif
    gate_and_up_of_rows<Product>(args, Vector::panel_elements(cols), rows, worker);
}

HIDDEN void NAMED(down)(const bf16 *x, const int32_t *chosen, const float *shares, const Stored *weight, const bf16 *bias,
                        const bf16 *residual, bf16 *out, int64_t rows, int64_t cols, int64_t out_cols, int64_t experts, int64_t top,
                        Worker &worker) {
    const SharedDown<Vector::Weight> args = {x, chosen, shares, panels_of(weight), bias, residual, out,
                                             cols, out_cols, {experts, top}};
#if !ISA_AMX
    if (rows == 0) return down_of_token<Vector>(args, worker);
#endif
    down_of_rows<Product>(args, Vector::panel_elements(cols), rows, worker);
}

}  // namespace ISA

#if ISA_AMX
// A token's experts are the same code as without tiles. Where experts have 16 rows or fewer on average, tiles take longer: they
// multiply 16 rows at least, and leave less time to hide the widening of weights in. Both make the same bits.
namespace avx512bf16 {
HIDDEN decltype(ISA::NAMED(gate_and_up)) NAMED(gate_and_up);
HIDDEN decltype(ISA::NAMED(down)) NAMED(down);
}  // namespace avx512bf16
#define BY_VECTORS(kernel, ...) avx512bf16::NAMED(kernel)(__VA_ARGS__)
#define BY_TILES(kernel, ...)                                               \
    if (rows * top <= 16 * experts) return BY_VECTORS(kernel, __VA_ARGS__); \
    ISA::NAMED(kernel)(__VA_ARGS__)
#else
#define BY_VECTORS(kernel, ...) ISA::NAMED(kernel)(__VA_ARGS__)
#define BY_TILES BY_VECTORS
#endif

using ISA::Stored;

constexpr int64_t a_token = 0;

KERNEL void NAMED(moe_gemv_silu)(const bf16 *x, const int32_t *chosen, const Stored *gate, const Stored *up, bf16 *out,
                                 int64_t out_cols, int64_t cols, int64_t experts, int64_t top, int64_t activation,
                                 Worker &worker) {
    BY_VECTORS(gate_and_up, x, chosen, gate, up, nullptr, nullptr, out, a_token, cols, out_cols, experts, top, activation, worker);
}

KERNEL void NAMED(moe_gemv_silu_bias)(const bf16 *x, const int32_t *chosen, const Stored *gate, const Stored *up,
                                      const bf16 *gate_bias, const bf16 *up_bias, bf16 *out, int64_t out_cols, int64_t cols,
                                      int64_t experts, int64_t top, int64_t activation, Worker &worker) {
    BY_VECTORS(gate_and_up, x, chosen, gate, up, gate_bias, up_bias, out, a_token, cols, out_cols, experts, top, activation, worker);
}

KERNEL void NAMED(moe_gemm_silu)(const bf16 *x, const int32_t *chosen, const Stored *gate, const Stored *up, bf16 *out,
                                 int64_t rows, int64_t cols, int64_t out_cols, int64_t experts, int64_t top,
                                 int64_t activation, Worker &worker) {
    BY_TILES(gate_and_up, x, chosen, gate, up, nullptr, nullptr, out, rows, cols, out_cols, experts, top, activation, worker);
}

KERNEL void NAMED(moe_gemm_silu_bias)(const bf16 *x, const int32_t *chosen, const Stored *gate, const Stored *up,
                                      const bf16 *gate_bias, const bf16 *up_bias, bf16 *out, int64_t rows, int64_t cols,
                                      int64_t out_cols, int64_t experts, int64_t top, int64_t activation, Worker &worker) {
    BY_TILES(gate_and_up, x, chosen, gate, up, gate_bias, up_bias, out, rows, cols, out_cols, experts, top, activation, worker);
}

KERNEL void NAMED(moe_gemv)(const bf16 *x, const int32_t *chosen, const float *shares, const Stored *weight, bf16 *out,
                            int64_t out_cols, int64_t cols, int64_t experts, int64_t top, Worker &worker) {
    BY_VECTORS(down, x, chosen, shares, weight, nullptr, nullptr, out, a_token, cols, out_cols, experts, top, worker);
}

KERNEL void NAMED(moe_gemv_add)(const bf16 *x, const int32_t *chosen, const float *shares, const Stored *weight,
                                const bf16 *residual, bf16 *out, int64_t out_cols, int64_t cols, int64_t experts,
                                int64_t top, Worker &worker) {
    BY_VECTORS(down, x, chosen, shares, weight, nullptr, residual, out, a_token, cols, out_cols, experts, top, worker);
}

KERNEL void NAMED(moe_gemv_bias)(const bf16 *x, const int32_t *chosen, const float *shares, const Stored *weight,
                                 const bf16 *bias, bf16 *out, int64_t out_cols, int64_t cols, int64_t experts, int64_t top,
                                 Worker &worker) {
    BY_VECTORS(down, x, chosen, shares, weight, bias, nullptr, out, a_token, cols, out_cols, experts, top, worker);
}

KERNEL void NAMED(moe_gemv_bias_add)(const bf16 *x, const int32_t *chosen, const float *shares, const Stored *weight,
                                     const bf16 *bias, const bf16 *residual, bf16 *out, int64_t out_cols, int64_t cols,
                                     int64_t experts, int64_t top, Worker &worker) {
    BY_VECTORS(down, x, chosen, shares, weight, bias, residual, out, a_token, cols, out_cols, experts, top, worker);
}

KERNEL void NAMED(moe_gemm)(const bf16 *x, const int32_t *chosen, const float *shares, const Stored *weight, bf16 *out,
                            int64_t rows, int64_t cols, int64_t out_cols, int64_t experts, int64_t top, Worker &worker) {
    BY_TILES(down, x, chosen, shares, weight, nullptr, nullptr, out, rows, cols, out_cols, experts, top, worker);
}

KERNEL void NAMED(moe_gemm_add)(const bf16 *x, const int32_t *chosen, const float *shares, const Stored *weight,
                                const bf16 *residual, bf16 *out, int64_t rows, int64_t cols, int64_t out_cols,
                                int64_t experts, int64_t top, Worker &worker) {
    BY_TILES(down, x, chosen, shares, weight, nullptr, residual, out, rows, cols, out_cols, experts, top, worker);
}

KERNEL void NAMED(moe_gemm_bias)(const bf16 *x, const int32_t *chosen, const float *shares, const Stored *weight,
                                 const bf16 *bias, bf16 *out, int64_t rows, int64_t cols, int64_t out_cols, int64_t experts,
                                 int64_t top, Worker &worker) {
    BY_TILES(down, x, chosen, shares, weight, bias, nullptr, out, rows, cols, out_cols, experts, top, worker);
}

KERNEL void NAMED(moe_gemm_bias_add)(const bf16 *x, const int32_t *chosen, const float *shares, const Stored *weight,
                                     const bf16 *bias, const bf16 *residual, bf16 *out, int64_t rows, int64_t cols,
                                     int64_t out_cols, int64_t experts, int64_t top, Worker &worker) {
    BY_TILES(down, x, chosen, shares, weight, bias, residual, out, rows, cols, out_cols, experts, top, worker);
}
