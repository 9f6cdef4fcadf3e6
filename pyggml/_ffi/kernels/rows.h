/* What the kernels that sum along rows share. */

#pragma once

#include "common.h"

/* Sums run in single precision over a block, in double over the blocks: long rows lose no accuracy, and both parts vectorise. */
enum { BLOCK = 256 };

/* The largest element, -inf for a row of NaN. */
static inline float row_max(const float * x, int64_t n) {
    float top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < n; j++) {
        top = x[j] > top ? x[j] : top;
    }
    return top;
}
