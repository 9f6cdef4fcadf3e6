/* An elementwise kernel from one formula.
 *
 * UNARY(name, formula) defines pg_name(ctx, x): the formula says what becomes of an element a. BINARY and TERNARY have elements
 * b and c too, and broadcast all of their inputs by NumPy's rule. With _P or _PQ the formula has parameters p and q too, which
 * pg_name takes last. A formula without branches or calls into libm is vectorised. */

#pragma once

#include "common.h"

enum { ROW_BLOCK = 256, MAX_INPUTS = 3 };

/* y may be one of the inputs, element for element: hence no restrict, but omp simd. */
typedef void (*row_function)(
    float * y, const float * x0, const float * x1, const float * x2, int64_t n, float p, float q);

static inline int64_t elements_before(const struct ggml_tensor * t, int axis) {
    int64_t elements = 1;
    for (int i = 0; i < axis; i++) {
        elements *= t->ne[i];
    }
    return elements;
}

/* The length of rows made of the output's first axes, joined while each input is either as long along all of them or has one
 * element: a number for each channel of images meets whole planes. *next becomes the first axis that is not in it. */
static inline int64_t joined_width(const struct ggml_tensor * dst, int inputs, int * next) {
    int64_t width = dst->ne[0];
    for (*next = 1; *next < 4; (*next)++) {
        const int64_t longer = width * dst->ne[*next];
        for (int k = 0; k < inputs; k++) {
            const int64_t elements = elements_before(dst->src[k], *next + 1);
            if (elements != longer && elements != 1) {
                return width;
            }
        }
        width = longer;
    }
    return width;
}

/* Call f on worker ith's share of the output, in blocks of at most ROW_BLOCK elements of one row. An input with one element in
 * the row comes as a block of copies, so f need not know about broadcasting. */
static inline void run_elementwise(struct ggml_tensor * dst, int ith, int nth, row_function f) {
    const float p = get_param_f32(dst, 0), q = get_param_f32(dst, 1);
    float copies[MAX_INPUTS][ROW_BLOCK];
    const float * x[MAX_INPUTS] = {NULL};
    bool repeated[MAX_INPUTS] = {false};
    bool one_row = true; /* the whole share can be treated as one row */
    int inputs = 0, first_axis = 1;
    for (; inputs < MAX_INPUTS && dst->src[inputs] != NULL; inputs++) {
        const struct ggml_tensor * src = dst->src[inputs];
        repeated[inputs] = ggml_nelements(src) == 1;
        one_row = one_row && (repeated[inputs] || ggml_are_same_shape(src, dst));
    }
    int64_t begin, end, width = dst->ne[0];
    if (one_row) {
        share_of_work(ggml_nelements(dst), CACHE_LINE, ith, nth, &begin, &end);
        width = end - begin;
        end   = begin < end ? begin + 1 : begin;
    } else {
        width = joined_width(dst, inputs, &first_axis);
        share_of_work(ggml_nelements(dst) / MAX(width, 1), 1, ith, nth, &begin, &end);
    }
    for (int64_t row = begin; row < end; row++) {
        int64_t at[4] = {0}, rest = row;
        for (int axis = first_axis; axis < 4; axis++) {
            at[axis] = rest % dst->ne[axis];
            rest /= dst->ne[axis];
        }
        for (int k = 0; k < inputs; k++) {
            const struct ggml_tensor * src = dst->src[k];
            if (one_row) {
                x[k] = (const float *) src->data + (repeated[k] ? 0 : begin);
            } else {
                const char * data = src->data;
                for (int axis = first_axis; axis < 4; axis++) {
                    data += src->ne[axis] > 1 ? at[axis] * src->nb[axis] : 0;
                }
                x[k] = (const float *) data;
                repeated[k] = width > 1 && elements_before(src, first_axis) == 1;
            }
            for (int64_t i = 0; repeated[k] && i < MIN(width, ROW_BLOCK); i++) {
                copies[k][i] = x[k][0];
            }
        }
        float * y = (float *) dst->data + (one_row ? begin : row * width);
        for (int64_t j = 0; j < width; j += ROW_BLOCK) {
            const float * block[MAX_INPUTS];
            for (int k = 0; k < MAX_INPUTS; k++) {
                block[k] = k >= inputs ? NULL : repeated[k] ? copies[k] : x[k] + j;
            }
            f(y + j, block[0], block[1], block[2], MIN(width - j, ROW_BLOCK), p, q);
        }
    }
}

/* Make the node: the output has the size of the largest input along each axis. */
static inline struct ggml_tensor * elementwise_node(
    struct ggml_context * ctx, ggml_custom_op_t run, int inputs, struct ggml_tensor * a, struct ggml_tensor * b,
    struct ggml_tensor * c, float p, float q) {
    struct ggml_tensor * args[MAX_INPUTS] = {a, b, c};
    int64_t ne[4] = {1, 1, 1, 1};
    for (int k = 0; k < inputs; k++) {
        for (int axis = 0; axis < 4; axis++) {
            ne[axis] = MAX(ne[axis], args[k]->ne[axis]);
        }
    }
    struct ggml_tensor * node =
        ggml_custom_4d(ctx, GGML_TYPE_F32, ne[0], ne[1], ne[2], ne[3], args, inputs, run, GGML_N_TASKS_MAX, NULL);
    set_param_f32(node, 0, p);
    set_param_f32(node, 1, q);
    set_param_i32(node, IN_PLACE_PARAM, 1);
    return node;
}

#define ROWS(NAME, ELEMENTS, FORMULA)                                                                                     \
    static void row_##NAME(                                                                                               \
        float * y, const float * x0, const float * x1, const float * x2, int64_t n, float p, float q) {                   \
        (void) x1, (void) x2, (void) p, (void) q;                                                                         \
        _Pragma("omp simd")                                                                                               \
        for (int64_t i = 0; i < n; i++) {                                                                                 \
            ELEMENTS;                                                                                                     \
            y[i] = FORMULA;                                                                                               \
        }                                                                                                                 \
    }                                                                                                                     \
    static void run_##NAME(struct ggml_tensor * dst, int ith, int nth, void * unused) {                                   \
        (void) unused;                                                                                                    \
        run_elementwise(dst, ith, nth, row_##NAME);                                                                       \
    }

#define UNARY(NAME, FORMULA)                                                                                              \
    ROWS(NAME, const float a = x0[i], FORMULA)                                                                            \
    struct ggml_tensor * pg_##NAME(struct ggml_context * ctx, struct ggml_tensor * x) {                                   \
        return elementwise_node(ctx, run_##NAME, 1, x, NULL, NULL, 0.0f, 0.0f);                                           \
    }

#define UNARY_P(NAME, FORMULA)                                                                                            \
    ROWS(NAME, const float a = x0[i], FORMULA)                                                                            \
    struct ggml_tensor * pg_##NAME(struct ggml_context * ctx, struct ggml_tensor * x, float p) {                          \
        return elementwise_node(ctx, run_##NAME, 1, x, NULL, NULL, p, 0.0f);                                              \
    }

#define UNARY_PQ(NAME, FORMULA)                                                                                           \
    ROWS(NAME, const float a = x0[i], FORMULA)                                                                            \
    struct ggml_tensor * pg_##NAME(struct ggml_context * ctx, struct ggml_tensor * x, float p, float q) {                 \
        return elementwise_node(ctx, run_##NAME, 1, x, NULL, NULL, p, q);                                                 \
    }

#define BINARY(NAME, FORMULA)                                                                                             \
    ROWS(NAME, const float a = x0[i]; const float b = x1[i], FORMULA)                                                     \
    struct ggml_tensor * pg_##NAME(struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * y) {           \
        return elementwise_node(ctx, run_##NAME, 2, x, y, NULL, 0.0f, 0.0f);                                              \
    }

#define BINARY_PQ(NAME, FORMULA)                                                                                          \
    ROWS(NAME, const float a = x0[i]; const float b = x1[i], FORMULA)                                                     \
    struct ggml_tensor * pg_##NAME(                                                                                       \
        struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * y, float p, float q) {                    \
        return elementwise_node(ctx, run_##NAME, 2, x, y, NULL, p, q);                                                    \
    }

#define TERNARY(NAME, FORMULA)                                                                                            \
    ROWS(NAME, const float a = x0[i]; const float b = x1[i]; const float c = x2[i], FORMULA)                              \
    struct ggml_tensor * pg_##NAME(                                                                                       \
        struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * y, struct ggml_tensor * z) {              \
        return elementwise_node(ctx, run_##NAME, 3, x, y, z, 0.0f, 0.0f);                                                 \
    }
