/* Arithmetic and functions of one number. */

#include "elementwise.h"

BINARY(add, a + b)
BINARY(sub, a - b)
BINARY(mul, a * b)
BINARY(div, a / b)
UNARY_PQ(affine, a * p + q)
UNARY(exp, fast_expf(a))
UNARY(log, log_of(a))
UNARY(sign, a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : a) /* keeps NaN */
BINARY(pow, powf(a, b))

enum { MAX_FACTORS = 4 }; /* with more, products lose more digits than powf */

/* x0 to the power p. */
static void row_power(
    float * y, const float * x0, const float * x1, const float * x2, int64_t n, float p, float q) {
    (void) x1, (void) x2, (void) q;
    if (p != rintf(p) || fabsf(p) > MAX_FACTORS) {
        for (int64_t i = 0; i < n; i++) {
            y[i] = powf(x0[i], p);
        }
        return;
    }
    float factor[ROW_BLOCK]; /* x, x^2, x^4 in turn, or their reciprocals */
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        factor[i] = p < 0.0f ? 1.0f / x0[i] : x0[i];
        y[i]      = 1.0f;
    }
    for (int left = (int) fabsf(p); left > 0; left >>= 1) {
        for (int64_t i = 0; i < n; i++) {
            y[i] = left & 1 ? y[i] * factor[i] : y[i];
            factor[i] *= factor[i];
        }
    }
}

static void run_power(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    run_elementwise(dst, ith, nth, row_power);
}

struct ggml_tensor * pg_power(struct ggml_context * ctx, struct ggml_tensor * x, float exponent) {
    return elementwise_node(ctx, run_power, 1, x, NULL, NULL, exponent, 0.0f);
}
