/* Activations and their gradients. */

#include "elementwise.h"

UNARY(relu, a < 0.0f ? 0.0f : a) /* keeps NaN */
BINARY(relu_back, b > 0.0f ? a : 0.0f)
UNARY(tanh, tanhf(a))
UNARY(sigmoid, 1.0f / (1.0f + fast_expf(-a)))
