// Compiles KERNEL_FILE for one instruction set. The build runs the compiler on this header once for each set
// (stages/targets/cpu/instruction_sets.py), and says which one it is:
//   ISA        its name, and the namespace of the code: amx, avx512bf16, avx2 or portable
//   ISA_LANES  f32 lanes of its vector registers: 16, 8 or 4
//   ISA_AMX    1 if it has tiles (amx.h), else 0
//
// A kernel's file includes vec.h and what else it needs, keeps its code in namespace ISA, and defines the kernel behind it.
// In the object for avx2 the kernel `add` is the symbol `add_avx2`; the generated source of a library has the `add` that
// calls the one for this machine. All else in an object has to stay inside it: another set's code would not run everywhere.
//
// The target pragma does not reach lambdas in every compiler: kernels use function objects instead.
#include "isa.h"
#include "joined.h"
#include "kernel.h"
#include "panels.h"
#include "system.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors never cross a function boundary that is not inlined
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms out of the compiler's own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

// Whether the machine's own requests for lines run as far ahead as few long streams need: how panels are best read depends
// on that (streams.h). They do on Zen 4 and Zen 5, and do not on Granite Rapids.
[[maybe_unused]] static const bool reads_ahead = is_amd();

#if ISA_LANES == 16
#define ISA_FEATURES "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c"
#elif ISA_LANES == 8
#define ISA_FEATURES "avx2,fma,f16c"
#endif

#define ISA_PRAGMA(text) _Pragma(#text)
#if !defined(ISA_FEATURES)
#include KERNEL_FILE
#elif defined(__clang__)
#define ISA_BEGIN(features) ISA_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
ISA_BEGIN(ISA_FEATURES)
#include KERNEL_FILE
#pragma clang attribute pop
#else
#define ISA_BEGIN(features) ISA_PRAGMA(GCC target(features))
ISA_BEGIN(ISA_FEATURES)
#include KERNEL_FILE
#endif
