// The products and the embedding lookup of one grouped format (grouped.h), as gemm.cc, gemv.cc and embed.cc have them.
// A file for a format defines FORMAT, the format's struct, and NAMED(kernel), the kernel's name after the format's, and
// includes this.
#include "vec.h"
#include "epilogue.h"
#include "scale_row.h"
#include "operand.h"
#include "tile.h"
#if ISA_AMX
#include "amx.h"
#endif
#include "gemm_core.h"
#include "streams.h"
#include "fixed_point.h"
#include "pairs.h"
#include "grouped.h"
#include "minima.h"
#include "byte_rows.h"
#include "grouped_gemv.h"
#include "grouped_rows.h"
#include "grouped_gemm.h"
#include "w8a8.h"
#include "grouped_kernels.h"
