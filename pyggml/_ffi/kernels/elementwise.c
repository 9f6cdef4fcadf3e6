/* Functions of one number. */

#include "elementwise.h"

UNARY(exp, fast_expf(a))
UNARY(sign, a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : a) /* keeps NaN */
UNARY_WITH_TWO_PARAMETERS(affine, a * p + q)
