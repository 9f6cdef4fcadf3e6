/* What the kernels share: work splitting, parameters in a node, and (transcendental.h) functions such as the exponential.
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
#include "transcendental.h"

#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

enum { FIRST_FREE_PARAM = 6 }; /* index into op_params, in 4-byte units; 10 are free */
enum { IN_PLACE_PARAM = 9 };   /* of these: 1 where the result may take the place of an input of its shape (placement.c) */
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
