/* Functions of one float, to 1 or 2 ulp over the whole range unless their comment says otherwise; NaN stays NaN. Without
 * branches, so that compilers vectorise the loops around them.
 *
 * The polynomials are least-maximum fits of the relative error (iteratively reweighted least squares, Lawson 1961), made in
 * double precision and rounded; each has less than 0.3 ulp of its own. */

#pragma once

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>

static inline float float_of_bits(int32_t bits) {
    const union { int32_t i; float f; } both = {.i = bits};
    return both.f;
}

static inline int32_t bits_of_float(float x) {
    const union { float f; int32_t i; } both = {.f = x};
    return both.i;
}

/* x between two bounds; NaN stays. */
static inline float bounded(float x, float low, float high) {
    return x < low ? low : x > high ? high : x;
}

/* The nearest integer to x, for |x| < 2^22, as a float and an int: the sum with 1.5 * 2^23 has no bits left for a fraction, and
 * its last bits are the integer. */
struct rounded {
    float value;
    int32_t integer;
};

static inline struct rounded nearest(float x) {
    const float sum = x + 12582912.0f;
    return (struct rounded) {sum - 12582912.0f, (int32_t) ((uint32_t) bits_of_float(sum) - 0x4b400000u)};
}

/* 2^n for n from -126 to 127 */
static inline float power_of_two(int32_t n) {
    return float_of_bits((int32_t) ((uint32_t) (n + 127) << 23));
}

/* (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2 */
static inline float exp_tail(float r) {
    float p = 1.9845877e-4f;
    p       = p * r + 1.3940625e-3f;
    p       = p * r + 8.3333897e-3f;
    p       = p * r + 4.1666362e-2f;
    p       = p * r + 1.6666666e-1f;
    return p * r + 0.5f;
}

/* x + low - n ln(2): the first part of ln(2) has so few bits that its product with n is exact. */
static inline float reduced(float x, float low, float n) {
    return (x - n * 0.693359375f) + n * 2.12194440e-4f + low;
}

/* A power of e as a product of three floats, of which the last two are powers of 2. Kept apart, the result may be multiplied by
 * something before it leaves the range in which floats have all their digits. */
struct exponential {
    float mantissa, scale1, scale2;
};

/* e^(x + low) for x <= 89 and a low much smaller than x, which takes up the rounding error of x. */
static inline struct exponential exponential_of(float x, float low) {
    x                      = bounded(x, -170.0f, 89.0f);
    const struct rounded n = nearest((x + low) * 1.44269504f);
    const float r          = reduced(x, low, n.value);
    const int32_t half     = n.integer >> 1;
    return (struct exponential) {
        .mantissa = exp_tail(r) * r * r + r + 1.0f,
        .scale1   = power_of_two(half),
        .scale2   = power_of_two(n.integer - half),
    };
}

static inline float exponential_value(struct exponential e) {
    return e.mantissa * e.scale1 * e.scale2;
}

static inline float fast_expf(float x) {
    return exponential_value(exponential_of(x, 0.0f));
}

/* e^(x + low) where it and the power of 2 in it are normal numbers: for x from -87 to 88. */
static inline float normal_expf(float x, float low) {
    const struct rounded n = nearest((x + low) * 1.44269504f);
    const float r          = reduced(x, low, n.value);
    return (exp_tail(r) * r * r + r + 1.0f) * power_of_two(n.integer);
}

/* e^x - 1 for x <= 88 */
static inline float expm1_of(float x) {
    x                      = bounded(x, -30.0f, 88.0f);
    const struct rounded n = nearest(x * 1.44269504f);
    const float r          = reduced(x, 0.0f, n.value);
    const float s          = power_of_two(n.integer);
    return (exp_tail(r) * r * r + r) * s + (s - 1.0f);
}

/* log(1 + f) = f - f^2 / 2 + s (f^2 / 2 + R), with s = f / (2 + f) and R in powers of s^2. This is the part behind f, for f in
 * [-0.3, 1]. */
static inline float log1p_tail(float f) {
    const float s = f / (2.0f + f), z = s * s, half = 0.5f * f * f;
    float p       = 0.24289558f;
    p             = p * z + 0.21430741f;
    p             = p * z + 0.28616595f;
    p             = p * z + 0.39998889f;
    p             = p * z + 0.66666675f;
    return s * (half + p * z) - half;
}

static inline float log_of(float x) {
    const bool tiny    = x < FLT_MIN;
    const int32_t bits = bits_of_float(tiny ? x * 8388608.0f : x);
    const int32_t k    = (bits - 0x3f3504f3) >> 23; /* the rest is in [sqrt(1/2), sqrt(2)) */
    const float f      = float_of_bits(bits - (int32_t) ((uint32_t) k << 23)) - 1.0f;
    const float n      = (float) (k - (tiny ? 23 : 0));
    const float value  = n * 0.693359375f + (f + (log1p_tail(f) - n * 2.12194440e-4f));
    return x > 0.0f ? (x <= FLT_MAX ? value : x) : x == 0.0f ? -INFINITY : NAN;
}

static inline float tanh_of(float x) {
    const float e = expm1_of(2.0f * bounded(fabsf(x), 0.0f, 20.0f));
    return copysignf(e / (e + 2.0f), x);
}

/* x / (1 + e^-x), x * sigmoid(x), and 1 / (1 + e^-x): a fraction below 1 for either sign, so that no digits are lost. */
static inline float sigmoid_times(float x, float factor) {
    const struct exponential e = exponential_of(-fabsf(x), 0.0f);
    const bool above  = x >= 0.0f;
    const float share = (above ? factor : factor * e.mantissa) / (1.0f + exponential_value(e));
    return share * (above ? 1.0f : e.scale1) * (above ? 1.0f : e.scale2);
}

static inline float sigmoid_of(float x) {
    return sigmoid_times(x, 1.0f);
}

static inline float silu_of(float x) {
    return sigmoid_times(x, x < -170.0f ? -170.0f : x); /* 0 at -inf */
}

/* The derivative of silu. */
static inline float silu_slope(float x) {
    const float b = bounded(x, -170.0f, 170.0f), e = fast_expf(-fabsf(b));
    const float inverse = 1.0f / (1.0f + e);
    return (b >= 0.0f ? 1.0f : e) * inverse + b * e * inverse * inverse;
}

/* log(1 + e^x) */
static inline float softplus_of(float x) {
    const float e = fast_expf(-fabsf(x));
    return (x < 0.0f ? 0.0f : x) + (e + log1p_tail(e));
}

/* The normal distribution at t >= 0: its upper tail is this ratio times e^(-t^2/2). */
static inline float normal_tail_ratio(float t) {
    const float w = 1.0f / (t + 2.5f), v = 1.0f - 5.0f * w;
    float p       = -1.5775235e-4f;
    p             = p * v - 3.1162280e-4f;
    p             = p * v + 6.8441271e-4f;
    p             = p * v + 2.5239326e-3f;
    p             = p * v - 1.6008300e-3f;
    p             = p * v - 1.6386185e-2f;
    p             = p * v + 9.2358757e-3f;
    p             = p * v + 1.3198698e-1f;
    p             = p * v - 4.3369201e-1f;
    p             = p * v + 7.0665663e-1f;
    return p * w;
}

enum { NORMAL_END = 15 }; /* the normal density beyond is 0 in a float */

/* x times the normal distribution function: relu(x) less the tail, for either sign. To 6 ulp for x < 0, where it is the tail:
 * the exponent is exact to twice a float's digits, t^2 being a product of 12-bit numbers and a small rest; and only the last
 * product may leave the range of normal numbers, the density being a square. */
static inline float gelu_of(float x) {
    const float size = fabsf(x), t = size > NORMAL_END ? NORMAL_END : size;
    const float high = float_of_bits(bits_of_float(t) & ~0xfff);
    const float root = normal_expf(-0.25f * high * high, -0.25f * (t - high) * (t + high));
    return (x < 0.0f ? 0.0f : x) - t * normal_tail_ratio(t) * root * root;
}

/* Its derivative, accurate beside 1; from 13 on it is 0 or 1. */
static inline float gelu_slope(float x) {
    const float b = bounded(x, -13.0f, 13.0f), t = fabsf(b);
    const float density = t < 13.0f ? normal_expf(-0.5f * t * t, 0.0f) : 0.0f, tail = normal_tail_ratio(t);
    return (b >= 0.0f ? 1.0f : 0.0f) + density * ((b >= 0.0f ? -tail : tail) + 0.39894228f * b);
}

/* x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3): GELU by way of tanh. In the tail the value is x e^(2 u), and the
 * rounding error of u counts: 1e-6 of it at x = -3, 2e-5 at -10. */
static inline float gelu_tanh_of(float x) {
    const float b = bounded(x, -NORMAL_END, NORMAL_END);
    return sigmoid_times(b * (1.59576912f + 0.07135481f * b * b), x < -NORMAL_END ? -NORMAL_END : x);
}

static inline float gelu_tanh_slope(float x) {
    const float b = bounded(x, -NORMAL_END, NORMAL_END), square = b * b;
    const float z = b * (1.59576912f + 0.07135481f * square);
    const float e = fast_expf(-fabsf(z)), inverse = 1.0f / (1.0f + e);
    return (b >= 0.0f ? 1.0f : e) * inverse + b * (1.59576912f + 0.21406444f * square) * e * inverse * inverse;
}
