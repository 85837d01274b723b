// ROWS outputs of a matrix times a vector, in chunks of KC inputs. x [COLS], acc f32 [ROWS], out bf16 [ROWS].
// BLOCKED=0: a [ROWS][KC], row-major. BLOCKED=1: a [ROWS/8][KC/8][8 inputs][8 outputs], the blocks that gemm.cc reads.
#include "tile.h"

namespace {

#if BLOCKED

static_assert(ROWS % EDGE == 0 && KC % EDGE == 0);
static_assert(EDGE == 8, "a vector holds a block in bf16, or half of one in f32");

// Lane EDGE * k + n of the result holds x[k].
aie::vector<bfloat16, BLOCK> spread(const bfloat16 *x) {
    return aie::transpose(repeat<BLOCK>(aie::load_v<EDGE>(x)), EDGE, EDGE);
}

void add_product(const bfloat16 *a, const bfloat16 *x, float *acc) {
    aie::accum<accfloat, BLOCK> sum = aie::zeros<accfloat, BLOCK>();
    for (unsigned k = 0; k < KC; k += EDGE, a += BLOCK) sum = aie::mac(sum, aie::load_v<BLOCK>(a), spread(x + k));
    const auto high = sum.template extract<HALF>(1).template to_vector<float>();
    const auto four = aie::add(sum.template extract<HALF>(0), high).template to_vector<float>();
    aie::store_v(acc, aie::add(aie::load_v<EDGE>(acc), sum_of_rows(four)));
}

constexpr unsigned SHARING = EDGE;

#else

constexpr unsigned L = lanes_for(KC, 64);
static_assert(KC % L == 0);
// Rows that share each load of x.
constexpr unsigned SHARING = sharing(ROWS);

template <unsigned Lanes>
float total(const aie::accum<accfloat, Lanes> &sum) {
    if constexpr (Lanes == 64) {
        const auto high = sum.template extract<32>(1).template to_vector<float>();
        return aie::reduce_add(aie::add(sum.template extract<32>(0), high).template to_vector<float>());
    } else {
        return aie::reduce_add(sum.template to_vector<float>());
    }
}

void add_product(const bfloat16 *a, const bfloat16 *x, float *acc) {
    Registers<aie::accum<accfloat, L>, SHARING> sum;
    unrolled<SHARING>([&](auto r) { sum.get(r) = aie::zeros<accfloat, L>(); });
    for (unsigned k = 0; k < KC; k += L) {
        const aie::vector<bfloat16, L> chunk = aie::load_v<L>(x + k);
        unrolled<SHARING>([&](auto r) { sum.get(r) = aie::mac(sum.get(r), aie::load_v<L>(a + r * KC + k), chunk); });
    }
    unrolled<SHARING>([&](auto r) { acc[r] += total(sum.get(r)); });
}

#endif

}  // namespace

extern "C" void AIE_FN(gemv_zero)(float *__restrict acc) {
    for (unsigned m = 0; m < ROWS; ++m) acc[m] = 0.0f;
}

// acc += a @ x[k0 : k0 + KC]
extern "C" void AIE_FN(gemv_step)(const bfloat16 *__restrict a, const bfloat16 *__restrict x, int32 k0,
                                  float *__restrict acc) {
    for (unsigned m = 0; m < ROWS; m += SHARING) add_product(a + m * KC, x + k0, acc + m);
}

extern "C" void AIE_FN(gemv_out)(const float *__restrict acc, bfloat16 *__restrict out) {
    use_nearest_even();
    // A tile may have fewer rows than the narrowest vector: round through one padded vector.
    for (unsigned m = 0; m < ROWS; m += 16) {
        const unsigned rows = ROWS - m < 16 ? ROWS - m : 16;
        alignas(64) float wide[16] = {};
        alignas(32) bfloat16 narrow[16];
        for (unsigned r = 0; r < rows; ++r) wide[r] = acc[m + r];
        aie::store_v(narrow, aie::accum<accfloat, 16>(aie::load_v<16>(wide)).template to_vector<bfloat16>());
        for (unsigned r = 0; r < rows; ++r) out[m + r] = narrow[r];
    }
}
