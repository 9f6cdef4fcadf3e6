/* Comparisons, and the choices made by them. */

#include "elementwise.h"

BINARY(greater, a > b ? 1.0f : 0.0f)
BINARY(equal, a == b ? 1.0f : 0.0f)
BINARY(maximum, a > b || a != a ? a : b) /* NaN where either is; b in a tie */
BINARY(minimum, a < b || a != a ? a : b)
TERNARY(where, a != 0.0f ? b : c)
UNARY_PQ(clamp, a < p ? p : a > q ? q : a) /* keeps NaN */
BINARY_PQ(clamp_back, b > p && b < q ? a : 0.0f)
