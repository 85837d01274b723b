// Which instruction set the kernels use: the best that this machine and the library have, found once, when the shared
// object is loaded. LLAMA_NPU2_ISA names a lower one.
#pragma once

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum class Isa { none = -1, portable, avx2, avx512bf16, amx };

constexpr unsigned isa_bit(Isa isa) { return 1u << static_cast<int>(isa); }

// The sets that the library has code for, as bits. The generated source of a library defines it.
extern "C" __attribute__((visibility("hidden"))) const unsigned library_isas;

#if defined(__x86_64__)
// AMX has 8 KB of registers, which Linux keeps for processes that ask for it, if it does.
inline bool system_keeps_tiles() {
    constexpr int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

// __builtin_cpu_supports would do, but not every compiler's run time library has what it needs.
inline Isa supported_isa() {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return Isa::portable;
    const unsigned wanted = 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29;  // FMA, OSXSAVE, AVX, F16C
    if ((ecx & wanted) != wanted) return Isa::portable;
    unsigned enabled, high;
    asm volatile("xgetbv" : "=a"(enabled), "=d"(high) : "c"(0));
    if ((enabled & 0x6) != 0x6) return Isa::portable;  // the system saves ymm registers

    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(ebx & 1u << 5)) return Isa::portable;
    const unsigned f_dq_bw_vl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    if ((ebx & f_dq_bw_vl) != f_dq_bw_vl || (enabled & 0xe6) != 0xe6) return Isa::avx2;
    if (!(ecx & 1u << 11)) return Isa::avx2;  // VNNI
    const unsigned bf16_tile_int8 = 1u << 22 | 1u << 24 | 1u << 25;
    const bool amx = (edx & bf16_tile_int8) == bf16_tile_int8 && (enabled & 0x60000) == 0x60000;
    if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || !(eax & 1u << 5)) return Isa::avx2;
    return amx && system_keeps_tiles() ? Isa::amx : Isa::avx512bf16;
}

inline bool is_amd() {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(0, &eax, &ebx, &ecx, &edx) && ebx == signature_AMD_ebx;
}
#else
inline Isa supported_isa() { return Isa::portable; }
inline bool is_amd() { return false; }
#endif

// The best set that may be used, whatever the library has.
inline Isa allowed_isa() {
    const Isa best = supported_isa();
    const char *name = getenv("LLAMA_NPU2_ISA");
    if (name == nullptr) return best;
    Isa wanted = best;
    if (strcmp(name, "portable") == 0) wanted = Isa::portable;
    if (strcmp(name, "avx2") == 0) wanted = Isa::avx2;
    if (strcmp(name, "avx512bf16") == 0) wanted = Isa::avx512bf16;
    return wanted < best ? wanted : best;
}

// `none` if the library has code for better sets only.
inline Isa chosen_isa() {
    Isa isa = allowed_isa();
    while (isa != Isa::none && !(library_isas & isa_bit(isa))) isa = static_cast<Isa>(static_cast<int>(isa) - 1);
    return isa;
}
