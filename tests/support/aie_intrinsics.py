"""Declarations with which a host compiler reads the AIE API's headers: the types and intrinsics of the AIE2P compiler.

Nothing is defined, so what is compiled against them can be checked and not run. Vectors are the host compiler's,
accumulators are vectors of a type of their own, so that overloads are told apart. Every intrinsic that the headers
name has an ellipsis besides its declarations here: a call that none of them takes is found in what is compiled.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

BITS = {"float": 32, "int8": 8, "uint8": 8, "int16": 16, "uint16": 16, "int32": 32, "uint32": 32, "bfloat16": 16}
INTEGERS = [name for name in BITS if "int" in name]
NARROW = {"int4": "signed _BitInt(8)", "uint4": "unsigned _BitInt(8)"}
ACCUMULATORS = {"acc32": 32, "acc64": 64, "accfloat": 32}
SPARSE = ("256int4", "128int8", "64int16", "256int8", "128int16", "512int4")
REGISTER = 512

NOT_DECLARED = "none_of_the_declared"

PREAMBLE = """
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#define __AIE_MODEL_VERSION__ 11500
#define AIE_VECTOR_LDST_ALIGN 64
#define chess_const(x) __builtin_constant_p(x)
#define chess_manifest(x) (__builtin_constant_p(x) && (x))
#define chess_error(x)
#define chess_warning(x)
#define chess_copy(x) (x)
#define chess_duplicate(x) (x)
#define chess_dont_chain(x) (x)
#define chess_dont_care(t) t()
#define chess_storage(...)
#define chess_protect_access
#define chess_prepare_for_pipelining
#define chess_loop_range(...)
#define chess_unroll_loop(...)
#define chess_separator()
#define chess_separator_scheduler(...)
#define chess_separator_scheduler_local()
#define property(x)
#define __aie_copy(x) x
#define __aie_register(...)
#define __aie_register_keep()
#define __aie_dm_resource_a
#define __aie_dm_resource_b
#define __aie_dm_resource_c
#define __aie_dm_resource_d
#define __aie_dm_resource_ab
#define __aie_dm_resource_ac
#define __aie_dm_resource_ad
#define __aie_dm_resource_bc
#define __aie_dm_resource_bd
#define __aie_dm_resource_cd
#define __aie_dm_resource_stack

using bfloat16 = __bf16;
using int4_t = signed _BitInt(4);
using uint4_t = unsigned _BitInt(4);
using acc32 = unsigned _BitInt(32);
using acc64 = unsigned _BitInt(64);
using accfloat = signed _BitInt(32);
using addr_t = int32_t;
typedef uint32_t mask64 __attribute__((vector_size(8)));
struct cint16 { int16_t real, imag; };
struct cint32 { int32_t real, imag; };
struct cfloat { float real, imag; };
struct dims_2d_t { template <typename... T> dims_2d_t(T...); int num1, inc1, inc2, count1; };
struct dims_3d_t { template <typename... T> dims_3d_t(T...); int num1, inc1, num2, inc2, inc3, count1, count2; };
struct sparse_fifo_t {};
struct fifo_state_t { int pos; sparse_fifo_t fifo; };

enum class aie_dm_resource { none, stack, a, b, c, d, ab, ac, ad, bc, bd, cd };
template <typename T> using aie_dm_resource_remove_t = T;
template <typename T, aie_dm_resource> using aie_dm_resource_set_t = T;
template <typename T> constexpr auto aie_dm_resource_get_v = aie_dm_resource::none;
template <typename T, aie_dm_resource resource>
constexpr bool aie_dm_resource_is_same_v = resource == aie_dm_resource::none;
"""

STREAMS = """
enum class aie_stream_resource_{way} {{ none, a, b }};
template <typename T, aie_stream_resource_{way}> using aie_stream_resource_{way}_set_t = T;
template <typename T> constexpr auto aie_stream_resource_{way}_get_v = aie_stream_resource_{way}::none;
"""

# What has no pattern: modes, functions of one value, products of bf16, and conversions between registers.
SINGLE = """
enum { rnd_floor, rnd_ceil, rnd_pos_inf, rnd_neg_inf, rnd_sym_inf, rnd_sym_zero, rnd_conv_even, rnd_conv_odd,
       rnd_sym_floor, rnd_sym_ceil };
void set_rnd(unsigned); unsigned get_rnd(); void set_satmode(unsigned); unsigned get_satmode(); int get_coreid();
float inv(float); float invsqrt(float);
v16bfloat16 exp2(v16accfloat); v16bfloat16 tanh(v16accfloat);
v16float max(v16float, v16float); v16float min(v16float, v16float); unsigned lt(v16float, v16float);
v16bfloat16 to_v16bfloat16(v16accfloat); v32bfloat16 to_v32bfloat16(v32accfloat);
v16accfloat ups_to_v16accfloat(v16bfloat16); v32accfloat ups_to_v32accfloat(v32bfloat16);
v16int32 srs_to_v16int32(v16acc64, int, bool); v8int32 srs_to_v8int32(v8acc64, int, bool);
v32int16 srs_to_v32int16(v32acc32, int, bool);
v32uint16 srs_to_v32uint16(v32acc32, int, bool); v16uint16 srs_to_v16uint16(v16acc32, int, bool);
v32acc32 ups_to_v32acc32(v32int16, int, bool);
v32acc32 ups_to_v32acc32(v32uint16, int, bool); v16acc32 ups_to_v16acc32(v16uint16, int, bool);
v16acc64 ups_to_v16acc64(v16int32, int, bool);
v32acc64 ups_to_v32acc64(v32int16, int, bool); v32acc64 ups_to_v32acc64(v32uint16, int, bool);
v16int32 broadcast_elem_128(v16int32, int); v32bfloat16 broadcast_one_to_v32bfloat16();
v4bfloat16 extract_v4bfloat16(v32bfloat16, int); v2int32 extract_v2int32(v16int32, int); int extract_elem(v2int32, int);
v2int32 set_v2int32(int, int); v2int32 insert(v2int32, int, int); v16int32 insert(v16int32, int, v2int32);
v16int32 set_v16int32(int, v2int32);
unsigned long long set_uint64(int, unsigned); unsigned long long insert(unsigned long long, int, unsigned);
v32accfloat mul_elem_32(v32bfloat16, v32bfloat16); v32accfloat mac_elem_32(v32bfloat16, v32bfloat16, v32accfloat);
v32accfloat mac_elem_32_conf(v32bfloat16, v32bfloat16, v32accfloat, int, int, int);
v64accfloat mul_elem_64(v64bfloat16, v64bfloat16);
v64acc32 mul_elem_64_conf(v64uint16, bool, v64uint16, bool, int);
v64acc32 mac_elem_64_conf(v64uint16, bool, v64uint16, bool, v64acc32, int, int, int, int);
v32acc64 mac_4x8_8x8_conf(v32int16, bool, v64int8, bool, v32acc64, int, int, int, int);
v32acc64 mac_4x8_8x8_conf(v32int16, bool, v64uint8, bool, v32acc64, int, int, int, int);
v64bfp16ebs8 to_v64bfp16ebs8(v64accfloat); v64accfloat mul_8x8_8x8T(v64bfp16ebs8, v64bfp16ebs8);
v64accfloat mac_8x8_8x8T_conf(v64bfp16ebs8, v64bfp16ebs8, v64accfloat, int, int, int);
v64accfloat mac_8x8_8x8T_conf(v64bfp16ebs8, bool, v64bfp16ebs8, bool, v64accfloat, int, int, int);
void fifo_ld_fill(v64bfp16ebs8_unaligned *&, fifo_state_t &);
v64bfp16ebs8 fifo_ld_pop(v64bfp16ebs8_unaligned *&, fifo_state_t &);
v64bfp16ebs8 undef_v64bfp16ebs8();
v16acc32 shuffle(v16acc32, v16acc32, unsigned);
"""


def _types() -> Iterator[str]:
    for name, bits in BITS.items():
        for width in (16, 32, 64, 128, 256, 512, 1024):
            if width > bits:
                yield f"typedef {_element(name)} v{width // bits}{name} __attribute__((vector_size({width // 8})));"
    for name, element in NARROW.items():
        for width in (8, 16, 32, 64, 128, 256, 512, 1024):
            yield f"typedef {element} v{width // 4}{name} __attribute__((vector_size({width // 8})));"
    for name, bits in ACCUMULATORS.items():
        for width in (256, 512, 1024, 2048):
            yield f"typedef {name} v{width // bits}{name} __attribute__((vector_size({width // 8})));"
    for bits in (16, 24, 40, 48, 56):
        yield f"struct acc{bits} {{}}; struct cacc{bits} {{}};"
    yield "struct cacc32 {}; struct cacc64 {};"
    for size, sign in ((8, "signed"), (16, "unsigned")):
        yield f"struct bfp16ebs{size} {{}};"
        for lanes in (64, 128):
            block = f"v{lanes}bfp16ebs{size}"
            yield f"typedef {sign} _BitInt(16) {block} __attribute__((vector_size({2 * lanes})));"
            yield f"struct {block}_unaligned {{}};"
    for name in (*SPARSE, *(sparse.replace("int", "uint") for sparse in SPARSE)):
        yield f"struct v{name}_sparse {{}}; struct v{name}_sparse_unaligned {{}};"


def _element(name: str) -> str:
    return name if name in ("float", "bfloat16") else f"{name}_t"


def _parts(name: str, bits: int, widths: Sequence[int]) -> Iterator[str]:
    """Registers of a type, put together from smaller ones and taken apart."""
    for width in widths:
        whole = f"v{width // bits}{name}"
        yield f"{whole} undef_{whole}();"
        for part_width in (w for w in widths if w < width):
            part = f"v{part_width // bits}{name}"
            yield f"{part} extract_{part}({whole}, int); {whole} insert({whole}, int, {part});"
            yield f"{whole} set_{whole}(int, {part});"
            if width // part_width in (2, 4):
                yield f"{whole} concat({', '.join([part] * (width // part_width))});"


def _lanes(name: str, bits: int) -> Iterator[str]:
    """What is done to the lanes of one register."""
    whole, mask = f"v{REGISTER // bits}{name}", "unsigned long long" if bits <= 8 else "unsigned"
    yield f"{whole} shuffle({whole}, {whole}, unsigned); {whole} shuffle({whole}, unsigned);"
    yield f"{whole} shift_bytes({whole}, {whole}, int); {whole} sel({whole}, {whole}, {mask});"
    if name in BITS:
        element = _element(name)
        yield f"{element} extract_elem({whole}, int, bool = true); {whole} insert({whole}, int, {element});"
        yield f"{whole} broadcast_to_{whole}({element}); {whole} broadcast_zero_to_{whole}();"
    if bits in (8, 16):
        yield f"{whole} broadcast_to_{whole}(v{64 // bits}{name});"
    if name == "int32":
        yield f"{whole} broadcast_to_{whole}(v2int32);"
    if name in INTEGERS:
        for operation in ("add", "sub", "band", "bor", "bxor"):
            yield f"{whole} {operation}({whole}, {whole});"
    if name in (*INTEGERS, "bfloat16"):
        for operation in ("max", "min"):
            yield f"{whole} {operation}({whole}, {whole}, bool = true);"
        for operation in ("lt", "le", "gt", "ge", "eq", "ne"):
            yield f"{mask} {operation}({whole}, {whole}, bool = true);"


def _unpacking() -> Iterator[str]:
    """Numbers to twice as many bits, which fill a register."""
    for sign in ("", "u"):
        for bits in (4, 8):
            lanes = REGISTER // (2 * bits)
            yield f"v{lanes}{sign}int{2 * bits} unpack(v{lanes}{sign}int{bits}, bool);"


def _accumulators() -> Iterator[str]:
    for name, bits in ACCUMULATORS.items():
        for width in (512, 1024, 2048):
            whole = f"v{width // bits}{name}"
            yield f"{whole} broadcast_zero_to_{whole}(); {whole} neg({whole});"
            for operation in ("add", "sub"):
                yield f"{whole} {operation}({whole}, {whole});"
                for options in ("int, int, int", "int, int, int, int"):
                    yield f"{whole} {operation}_conf({whole}, {whole}, {options});"
    for lanes in (32, 64):
        v, acc = f"v{lanes}bfloat16", f"v{lanes}accfloat"
        yield f"{acc} mul_elem_{lanes}_conf({v}, bool, {v}, bool, int);"
        for operation in ("mac", "msc"):
            yield f"{acc} {operation}_elem_{lanes}_conf({v}, bool, {v}, bool, {acc}, int, int, int);"


def _modes(headers: Path) -> str:
    """Names of shuffles; which is which does not matter to a declaration."""
    pattern = re.compile(r"\b(?:T\d+_\d+x\d+(?:_(?:lo|hi|flip))?|D?INTLV_(?:lo|hi)_\d+o\d+)\b")
    found = {name for path in headers.rglob("*.hpp") for name in pattern.findall(path.read_text())}
    return f"enum {{ {', '.join(sorted(found))} }};"


def declarations(headers: Path, compiler: Sequence[str], work: Path) -> Path:
    """A header in `work`, to be included first, after which `compiler` reads `aie_api/aie.hpp` below `headers`.

    Raises AssertionError with the compiler's errors where it does not.
    """
    wide = ((name, bits, (128, 256, 512, 1024)) for name, bits in (BITS | {"int4": 4, "uint4": 4}).items())
    deep = ((name, bits, (256, 512, 1024, 2048)) for name, bits in ACCUMULATORS.items())
    streams = [STREAMS.format(way=way) for way in ("in", "out")]
    declared = [PREAMBLE, *streams, _modes(headers), *_types()]
    declared += [line for kind in (*wide, *deep) for line in _parts(*kind)]
    declared += [line for name, bits in (BITS | {"int4": 4, "uint4": 4}).items() for line in _lanes(name, bits)]
    declared += [*_unpacking(), *_accumulators(), SINGLE]
    layer, source = work / "aie_intrinsics.hpp", work / "aie_api.cc"
    source.write_text("#include <aie_api/aie.hpp>\n")
    known = set(
        re.findall(
            r"[ ;](?!v\d|undef_|broadcast_(?:zero|one)_|get_)(\w+)\((?=v\d|int|float|unsigned)", "\n".join(declared)
        )
    )
    ellipses = {name for name in known if name not in ("exp2", "tanh", "inv", "invsqrt")}
    for _ in range(8):
        anything = f"struct {NOT_DECLARED} {{ template <typename T> operator T() const; }};"
        layer.write_text("\n".join((*declared, anything, *(f"{NOT_DECLARED} {n}(...);" for n in sorted(ellipses)))))
        command = [*compiler, "-fsyntax-only", "-include", str(layer), str(source)]
        errors = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        missing = set(re.findall(r"error: no member named '(\w+)' in the global namespace", errors)) - ellipses
        if not missing:
            break
        ellipses |= missing
    assert "error:" not in errors, "\n".join(line for line in errors.splitlines() if "error:" in line)
    return layer
