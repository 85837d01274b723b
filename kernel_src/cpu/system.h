// The system's headers that kernels include. They take longer to read than most kernels to compile, so a build reads them
// once (stages/targets/cpu/objects.py).
#ifndef LLAMA_NPU2_SYSTEM_H  // a pragma would not do in a header that is compiled by itself
#define LLAMA_NPU2_SYSTEM_H

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#endif
