/* Activations and their gradients: in a _back, a is the gradient, b what the op's rule gives beside it. */

#include "elementwise.h"

UNARY(relu, a < 0.0f ? 0.0f : a) /* keeps NaN */
BINARY(relu_back, b > 0.0f ? a : 0.0f)
UNARY_P(leaky_relu, a >= 0.0f ? a : a * p)
UNARY_P(elu, a >= 0.0f ? a : p * expm1_of(a))
UNARY(tanh, tanh_of(a))
BINARY(tanh_back, a * (1.0f - b) * (1.0f + b))
UNARY(sigmoid, sigmoid_of(a))
BINARY(sigmoid_back, a * b * (1.0f - b))
UNARY(silu, silu_of(a))
BINARY(silu_back, a * silu_slope(b))
UNARY(softplus, softplus_of(a))
UNARY(gelu, gelu_of(a))
BINARY(gelu_back, a * gelu_slope(b))
UNARY(gelu_tanh, gelu_tanh_of(a))
BINARY(gelu_tanh_back, a * gelu_tanh_slope(b))
