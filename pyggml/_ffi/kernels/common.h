/* What the kernels share: work splitting, parameters in a node, and a vectorisable exponential.
 *
 * A kernel is a pair: run_NAME, which every ggml worker calls with its index, and pg_NAME, which makes the graph node. Scalars
 * travel in the node's op_params, behind the 24 bytes that ggml's custom op uses itself. */

#pragma once

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include "kernels.h"

#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

enum { FIRST_FREE_PARAM = 8 }; /* index into op_params, in 4-byte units */
enum { CACHE_LINE = 16 };      /* in floats */

static inline void set_param_f32(struct ggml_tensor * node, int i, float value) {
    memcpy(&node->op_params[FIRST_FREE_PARAM + i], &value, sizeof value);
}

static inline float get_param_f32(const struct ggml_tensor * node, int i) {
    float value;
    memcpy(&value, &node->op_params[FIRST_FREE_PARAM + i], sizeof value);
    return value;
}

static inline void set_param_i32(struct ggml_tensor * node, int i, int32_t value) {
    node->op_params[FIRST_FREE_PARAM + i] = value;
}

static inline int32_t get_param_i32(const struct ggml_tensor * node, int i) {
    return node->op_params[FIRST_FREE_PARAM + i];
}

/* Worker ith's share [*begin, *end) of n items, in whole multiples of grain. */
static inline void share_of_work(int64_t n, int64_t grain, int ith, int nth, int64_t * begin, int64_t * end) {
    const int64_t chunk = ((n + nth - 1) / nth + grain - 1) / grain * grain;
    *begin = MIN(ith * chunk, n);
    *end   = MIN(*begin + chunk, n);
}

/* e^x to about 1 ulp, written so that compilers vectorise it: x = n ln 2 + r, then a polynomial in r (Cephes' coefficients). */
static inline float fast_expf(float x) {
    const float clamped = x < -104.0f ? -104.0f : x > 88.8f ? 88.8f : x; /* keeps NaN */
    const float n       = rintf(clamped * 1.44269504088896341f);
    float r             = clamped - n * 0.693359375f;
    r                   = r + n * 2.12194440e-4f;
    float p             = 1.9875691500e-4f;
    p                   = p * r + 1.3981999507e-3f;
    p                   = p * r + 8.3334519073e-3f;
    p                   = p * r + 4.1665795894e-2f;
    p                   = p * r + 1.6666665459e-1f;
    p                   = p * r + 5.0000001201e-1f;
    p                   = p * r * r + r + 1.0f;
    /* 2^n in two factors, so that neither leaves the range of a float */
    const int32_t ni = (n == n) ? (int32_t) n : 0, half = ni >> 1;
    union { int32_t i; float f; } lo = {(half + 127) << 23}, hi = {(ni - half + 127) << 23};
    return p * lo.f * hi.f;
}
