// Compiles KERNEL_FILE once per instruction set, inside that instruction set's target pragma, with
//   ISA        the namespace to put the code in: amx, avx512bf16, avx2 or portable
//   ISA_LANES  f32 lanes of its vector registers: 16, 8 or 4
//   ISA_AMX    whether it has tiles (amx.h); files that define HAS_AMX have such a variant, others are avx512bf16's there
// and defines ISA_CALL(function, arguments...), which calls the variant for this machine.
//
// Usage, in a kernel's file:
//     #ifndef ISA
//     #define KERNEL_FILE "add.cc"
//     #include "each_isa.h"
//     ...the exported function, a single ISA_CALL...
//     #else
//     namespace ISA { ...the kernel... }
//     #endif
//
// The target pragma does not reach lambdas in every compiler: kernels use function objects instead.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "isa.h"
#include "kernel.h"
#include "panels.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors never cross a function boundary that is not inlined
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms out of the compiler's own intrinsics
#endif

// Whether the machine's own requests for lines run as far ahead as few long streams need: how panels are best read depends
// on that (streams.h). They do on Zen 4 and Zen 5, and do not on Granite Rapids.
static const bool reads_ahead = is_amd();

#if defined(__x86_64__)
#include <immintrin.h>

#define ISA_AMX 0
#define ISA avx512bf16
#define ISA_LANES 16
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")
#endif
#include KERNEL_FILE
#undef ISA
#if defined(HAS_AMX)
#undef ISA_AMX
#define ISA_AMX 1
#define ISA amx
#include KERNEL_FILE
#undef ISA
#undef ISA_AMX
#define ISA_AMX 0
#endif
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef ISA_LANES

#define ISA avx2
#define ISA_LANES 8
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#include KERNEL_FILE
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef ISA
#undef ISA_LANES
#endif

#undef ISA_AMX
#define ISA_AMX 0
#define ISA portable
#define ISA_LANES 4
#include KERNEL_FILE
#undef ISA
#undef ISA_LANES
#undef ISA_AMX

static const Isa isa = chosen_isa();

#if defined(HAS_AMX)
#define ISA_CALL_AMX(function, ...) \
    case Isa::amx:                  \
        return amx::function(__VA_ARGS__);
#else
#define ISA_CALL_AMX(function, ...) case Isa::amx:
#endif

#if defined(__x86_64__)
#define ISA_CALL(function, ...)                            \
    switch (isa) {                                         \
        ISA_CALL_AMX(function, __VA_ARGS__)                \
    case Isa::avx512bf16:                                  \
        return avx512bf16::function(__VA_ARGS__);          \
    case Isa::avx2:                                        \
        return avx2::function(__VA_ARGS__);                \
    default:                                               \
        return portable::function(__VA_ARGS__);            \
    }
#else
#define ISA_CALL(function, ...) return portable::function(__VA_ARGS__);
#endif
