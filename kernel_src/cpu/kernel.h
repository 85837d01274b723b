// What every kernel of target `cpu` is written with. What one computes, and the shapes of its tensors, stand at the top
// of its file.
//
// A signature is said in Python (stages/kernels): tensors first, then scalars, then the worker. Each source is compiled
// behind a header of prototypes made from there, so a definition with other types does not compile.
//
// Every thread of the team calls the same kernel with the same arguments and its own Worker; the
// kernel splits the work. No barrier is implied before or after: the caller puts one where data flows.
//
// Kernels that read or write a cache by positions take a table of its blocks, after their scalars: block `blocks[i]` of the
// cache holds the positions 128 i .. 128 i + 127.
//
// Tensors are row-major and unpadded. `weight_panels` and `table_panels` are [N][K] matrices in the
// panel layout of panels.h, 64-byte aligned. Accumulation is f32; results are rounded to nearest even.
#pragma once

#include <cstdint>

#include "team.h"

using bf16 = uint16_t;

// Linked into one shared object with their caller: hidden symbols cannot be interposed by the process.
#define KERNEL extern "C" __attribute__((visibility("hidden")))
