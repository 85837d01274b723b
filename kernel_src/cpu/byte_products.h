// The products of one grouped format with x in 8 bits (byte_rows.h), as grouped_products.h has them with x in 16.
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
#include "grouped_gemm.h"
#define PRODUCTS_ALONE
#include "grouped_kernels.h"
