// The kernels of experts (moe_kernels.h) with weights in one grouped format (grouped.h), or in w8a8. A file for a format
// defines FORMAT, the format's struct, and NAMED(kernel), the kernel's name after the format's, and includes this.
#include "vec.h"
#include "epilogue.h"
#include "operand.h"
#include "tile.h"
#if ISA_AMX
#include "amx.h"
#endif
#include "gemm_core.h"
#include "streams.h"
#include "gemv_core.h"
#include "fixed_point.h"
#include "pairs.h"
#include "grouped.h"
#include "minima.h"
#include "byte_rows.h"
#include "grouped_gemv.h"
#include "grouped_rows.h"
#include "grouped_gemm.h"
#include "w8a8.h"
#include "experts.h"
#include "expert_gemv.h"
#include "expert_gemm.h"

namespace ISA {
namespace {

template <class Format>
struct GroupedVector {
    using Weight = uint8_t;
    static constexpr bool paired = narrow_streams == 2;
    RowOf<Format> x;
    int64_t cols;

    static int64_t bytes(int64_t cols) { return size_of<Format>(cols).bytes(); }
    static int64_t panel_elements(int64_t cols) { return GroupedPanel<Format>::size(cols); }

    static GroupedVector take(const bf16 *x, int64_t cols, uint8_t *memory) {
        const SizeOf<Format> size = size_of<Format>(cols);
        const RowOf<Format> row = size.at(memory);
        take_row<Format>(x, size, row);
        return {row, cols};
    }

    template <class Run>
    INLINE void with_streams(int64_t cols, const Run &run) { with_grouped_streams<Format>(cols, run); }

    template <class Some>
    INLINE_MEMBER void times(const uint8_t *first, int64_t size, float *sums, const After<uint8_t> &after) const {
        grouped_panels_times_vector<Format, Some>(first, size, x, group_count<Format>(cols), sums, after);
    }
};

template <>
struct GroupedVector<W8A8> {
    using Weight = uint8_t;
    static constexpr bool paired = false;
    const uint8_t *x;
    int64_t cols;
    float scale;

    static int64_t bytes(int64_t cols) { return quantised_size(cols); }
    static int64_t panel_elements(int64_t cols) { return GroupedPanel<W8A8>::size(cols); }

    static GroupedVector take(const bf16 *x, int64_t cols, uint8_t *memory) {
        const float scale = quantise_row<FewNumber>(x, cols, memory);
        return {memory, cols, scale};
    }

    template <class Run>
    INLINE void with_streams(int64_t, const Run &run) { ISA::with_streams<most_integer_streams>(run); }

    template <class Some>
    INLINE_MEMBER void times(const uint8_t *first, int64_t size, float *sums, const After<uint8_t> &after) const {
        int32_t whole[Some::value * panel_rows];
        integer_panels_times_vector<Some>(first, size, x, quad_count(cols), whole, after);
        for (int64_t p = 0; p < Some::value; p++)
            scale_sums(whole + p * panel_rows, first + p * size, scale, sums + p * panel_rows);
    }
};

}  // namespace

using Stored = int8_t;
using Vector = GroupedVector<FORMAT>;

template <class Epilogue>
using Product = GroupedGemm<FORMAT, Epilogue>;

}  // namespace ISA

#include "moe_kernels.h"
