/* Reductions. */

#include "common.h"

enum { SUM_COLUMNS = 256, SUM_BLOCK = 32 };

enum { LANES = 32 };

/* The node of a reduction over the middle axis of x: (outer, inner). */
static struct ggml_tensor * over_middle(
    struct ggml_context * ctx, enum ggml_type type, struct ggml_tensor * x, int64_t outer, int64_t inner, ggml_custom_op_t run) {
    struct ggml_tensor * args[] = {x};
    return ggml_custom_4d(ctx, type, inner, outer, 1, 1, args, 1, run, GGML_N_TASKS_MAX, NULL);
}

/* Blocks are added in float, in as many lanes as vectorise well, and their sums in double. */
static float row_sum(const float * x, int64_t n) {
    double total = 0.0;
    for (int64_t block = 0; block < n; block += LANES * SUM_BLOCK) {
        const int64_t end = MIN(block + LANES * SUM_BLOCK, n);
        float lanes[LANES] = {0};
        int64_t i = block;
        for (; i + LANES <= end; i += LANES) {
            for (int j = 0; j < LANES; j++) {
                lanes[j] += x[i + j];
            }
        }
        for (; i < end; i++) {
            total += x[i];
        }
        for (int j = 0; j < LANES; j++) {
            total += lanes[j];
        }
    }
    return (float) total;
}

/* Rows are added in blocks, and the blocks' sums to the total: the rounding error grows with the number of blocks, not rows. */
static void run_sum_middle(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const int64_t inner = dst->ne[0], outer = dst->ne[1];
    const int64_t middle = ggml_nelements(dst->src[0]) / (inner * outer);
    int64_t begin, end;
    if (inner == 1) {
        share_of_work(outer, 1, ith, nth, &begin, &end);
        for (int64_t o = begin; o < end; o++) {
            ((float *) dst->data)[o] = row_sum((const float *) dst->src[0]->data + o * middle, middle);
        }
        return;
    }
    const int64_t strips = (inner + SUM_COLUMNS - 1) / SUM_COLUMNS;
    /* few strips: give each worker narrower ones, in whole cache lines */
    const int64_t narrow = (inner / nth + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    const int64_t width = outer * strips >= nth ? SUM_COLUMNS : MIN(MAX(narrow, CACHE_LINE), SUM_COLUMNS);
    const int64_t per_row = (inner + width - 1) / width;
    share_of_work(outer * per_row, 1, ith, nth, &begin, &end);
    for (int64_t item = begin; item < end; item++) {
        const int64_t o = item / per_row, column = item % per_row * width, n = MIN(width, inner - column);
        const float * x = (const float *) dst->src[0]->data + o * middle * inner + column;
        float * total = (float *) dst->data + o * inner + column;
        memset(total, 0, n * sizeof(float));
        for (int64_t row = 0; row < middle; row += SUM_BLOCK) {
            float part[SUM_COLUMNS] = {0};
            const int64_t last = MIN(row + SUM_BLOCK, middle);
            for (int64_t r = row; r < last; r++) {
                for (int64_t j = 0; j < n; j++) {
                    part[j] += x[r * inner + j];
                }
            }
            for (int64_t j = 0; j < n; j++) {
                total[j] += part[j];
            }
        }
    }
}

struct ggml_tensor * pg_sum_middle(struct ggml_context * ctx, struct ggml_tensor * x, int64_t outer, int64_t inner) {
    return over_middle(ctx, GGML_TYPE_F32, x, outer, inner, run_sum_middle);
}

/* The larger of two numbers; NaN if either is. */
static inline float larger(float x, float y) {
    return x > y || x != x ? x : y;
}

static float row_larger(const float * x, int64_t n) {
    float lanes[LANES], m = x[0];
    int64_t i = 0;
    if (n >= LANES) {
        memcpy(lanes, x, sizeof lanes);
        for (i = LANES; i + LANES <= n; i += LANES) {
            for (int j = 0; j < LANES; j++) {
                lanes[j] = larger(x[i + j], lanes[j]);
            }
        }
        for (int j = 0; j < LANES; j++) {
            m = larger(lanes[j], m);
        }
    }
    for (; i < n; i++) {
        m = larger(x[i], m);
    }
    return m;
}

static void run_max_middle(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const int64_t inner = dst->ne[0], outer = dst->ne[1];
    const int64_t middle = ggml_nelements(dst->src[0]) / (inner * outer);
    const float * x = dst->src[0]->data;
    float * y = dst->data;
    int64_t begin, end;
    share_of_work(outer * inner, inner == 1 ? 1 : CACHE_LINE, ith, nth, &begin, &end);
    if (inner == 1) {
        for (int64_t o = begin; o < end; o++) {
            y[o] = row_larger(x + o * middle, middle);
        }
        return;
    }
    for (int64_t i = begin; i < end;) {
        const int64_t o = i / inner, column = i % inner, n = MIN(inner - column, end - i);
        const float * first = x + o * middle * inner + column;
        float * restrict m = y + i;
        memcpy(m, first, n * sizeof(float));
        for (int64_t r = 1; r < middle; r++) {
            for (int64_t j = 0; j < n; j++) {
                m[j] = larger(first[r * inner + j], m[j]);
            }
        }
        i += n;
    }
}

struct ggml_tensor * pg_max_middle(struct ggml_context * ctx, struct ggml_tensor * x, int64_t outer, int64_t inner) {
    return over_middle(ctx, GGML_TYPE_F32, x, outer, inner, run_max_middle);
}

static void run_argmax_middle(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const int64_t inner = dst->ne[0], outer = dst->ne[1];
    const int64_t middle = ggml_nelements(dst->src[0]) / (inner * outer);
    int64_t begin, end;
    share_of_work(outer * inner, CACHE_LINE, ith, nth, &begin, &end);
    for (int64_t i = begin; i < end;) {
        const int64_t o = i / inner, column = i % inner, n = MIN(MIN(inner - column, end - i), SUM_COLUMNS);
        const float * x = (const float *) dst->src[0]->data + o * middle * inner + column;
        int32_t * best = (int32_t *) dst->data + i;
        float top[SUM_COLUMNS];
        memcpy(top, x, n * sizeof(float));
        memset(best, 0, n * sizeof(int32_t));
        for (int64_t r = 1; r < middle; r++) {
            for (int64_t j = 0; j < n; j++) {
                const float v = x[r * inner + j];
                const bool better = v > top[j] || (v != v && top[j] == top[j]);
                best[j] = better ? (int32_t) r : best[j];
                top[j]  = better ? v : top[j];
            }
        }
        i += n;
    }
}

struct ggml_tensor * pg_argmax_middle(struct ggml_context * ctx, struct ggml_tensor * x, int64_t outer, int64_t inner) {
    return over_middle(ctx, GGML_TYPE_I32, x, outer, inner, run_argmax_middle);
}
