// The products of one grouped format with x in 8 bits (byte_rows.h), as grouped_products.h has them with x in 16. Lookups do not
// depend on x.
#define PRODUCTS_ALONE
#include "grouped_products.h"
