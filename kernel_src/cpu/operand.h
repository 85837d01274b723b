// A vector as a product takes it: bf16 where vdpbf16ps widens it, else f32. Included inside each instruction set.
namespace ISA {
namespace {

#if ISA_LANES == 16
using Operand = bf16;
INLINE Operand operand(bf16 x) { return x; }
#else
using Operand = float;
INLINE Operand operand(bf16 x) { return to_float(x); }
#endif

// operands[padded] = x[cols] and zeros; returns operands.
INLINE const Operand *prepare(const bf16 *x, int64_t cols, int64_t padded, Operand *operands) {
    for (int64_t i = 0; i < cols; i++) operands[i] = operand(x[i]);
    for (int64_t i = cols; i < padded; i++) operands[i] = 0;
    return operands;
}

}  // namespace
}  // namespace ISA
