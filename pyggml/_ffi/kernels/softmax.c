/* Softmax along rows and its gradient, either of which may take the place of an input, row for row; log-softmax. */

#include "rows.h"

/* y = scale * x + mask. */
static void score_row(float * y, const float * x, const float * mask, int64_t n, float scale) {
    if (mask == NULL) {
#pragma omp simd
        for (int64_t j = 0; j < n; j++) {
            y[j] = x[j] * scale;
        }
    } else {
#pragma omp simd
        for (int64_t j = 0; j < n; j++) {
            y[j] = x[j] * scale + mask[j];
        }
    }
}

/* y = e^(y - shift), with zeros instead of denormal numbers, which are slow; returns the sum. */
static double exp_row(float * y, int64_t n, float shift) {
    double total = 0.0;
    for (int64_t b = 0; b < n; b += BLOCK) {
        const int64_t last = MIN(b + BLOCK, n);
        float part = 0.0f;
#pragma omp simd reduction(+ : part)
        for (int64_t j = b; j < last; j++) {
            const float v = y[j] - shift, e = normal_expf(v < -87.0f ? -87.0f : v, 0.0f);
            y[j] = v < -87.0f ? 0.0f : e;
            part += y[j];
        }
        total += part;
    }
    return total;
}

/* The keys that query i may see are the first `limit`: with fewer queries than keys, the queries are the last ones. */
static int64_t causal_limit(const struct ggml_tensor * t, int64_t row) {
    return t->ne[0] - t->ne[1] + row % t->ne[1] + 1;
}

static const float * mask_row(const struct ggml_tensor * mask, const struct ggml_tensor * x, int64_t row) {
    const int64_t i1 = row % x->ne[1], i2 = row / x->ne[1] % x->ne[2], i3 = row / (x->ne[1] * x->ne[2]);
    return (const float *) ((const char *) mask->data + i1 % mask->ne[1] * mask->nb[1] + i2 % mask->ne[2] * mask->nb[2] +
                            i3 % mask->ne[3] * mask->nb[3]);
}

static void run_softmax(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct ggml_tensor * x = dst->src[0], * mask = dst->src[1];
    const float scale = get_param_f32(dst, 0);
    const bool causal = get_param_i32(dst, 1);
    const int64_t n = x->ne[0], rows = ggml_nrows(x);
    int64_t begin = ith, end = rows;
    if (!causal) { /* else rows are of unequal length, and dealt out in turn */
        share_of_work(rows, 1, ith, nth, &begin, &end);
    }
    for (int64_t i = begin; i < end; i += causal ? nth : 1) {
        float * y = (float *) dst->data + i * n;
        const int64_t seen = causal ? causal_limit(x, i) : n;
        const float * m = mask == NULL ? NULL : mask_row(mask, x, i);
        /* whole vectors, what is not seen being -inf: their remainders would take longer than the vectors */
        const int64_t filled = MIN((seen + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE, n);
        score_row(y, (const float *) x->data + i * n, m, filled, scale);
        for (int64_t j = seen; j < filled; j++) {
            y[j] = -INFINITY;
        }
        const float top = row_max(y, filled);
        const bool all_masked = m != NULL && top == -INFINITY;
        const double total = exp_row(y, filled, all_masked ? 0.0f : top);
        const float factor = all_masked && total == 0.0 ? 0.0f : (float) (1.0 / total);
        for (int64_t j = 0; j < filled; j++) {
            y[j] *= factor;
        }
        for (int64_t j = seen; j < filled; j++) { /* of a row of NaN as well */
            y[j] = 0.0f;
        }
        memset(y + filled, 0, (n - filled) * sizeof(float));
    }
}

struct ggml_tensor * pg_softmax(
    struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * mask, float scale, bool causal) {
    struct ggml_tensor * args[] = {x, mask};
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, x->ne[0], x->ne[1], x->ne[2], x->ne[3], args, mask == NULL ? 1 : 2, run_softmax, GGML_N_TASKS_MAX,
        NULL);
    set_param_f32(node, 0, scale);
    set_param_i32(node, 1, causal);
    set_param_i32(node, IN_PLACE_PARAM, 1);
    return node;
}

static double dot_row(const float * x, const float * y, int64_t n) {
    double total = 0.0;
    for (int64_t b = 0; b < n; b += BLOCK) {
        const int64_t last = MIN(b + BLOCK, n);
        float part = 0.0f;
#pragma omp simd reduction(+ : part)
        for (int64_t j = b; j < last; j++) {
            part += x[j] * y[j];
        }
        total += part;
    }
    return total;
}

static void run_softmax_back(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct ggml_tensor * grad = dst->src[0];
    const float scale = get_param_f32(dst, 0);
    const bool causal = get_param_i32(dst, 1);
    const int64_t n = grad->ne[0], rows = ggml_nrows(grad);
    int64_t begin = ith, end = rows;
    if (!causal) {
        share_of_work(rows, 1, ith, nth, &begin, &end);
    }
    for (int64_t i = begin; i < end; i += causal ? nth : 1) {
        const float * g = (const float *) grad->data + i * n, * y = (const float *) dst->src[1]->data + i * n;
        float * dx = (float *) dst->data + i * n;
        const int64_t seen = causal ? causal_limit(grad, i) : n;
        const float dot = (float) dot_row(g, y, seen);
#pragma omp simd
        for (int64_t j = 0; j < seen; j++) {
            dx[j] = scale * y[j] * (g[j] - dot);
        }
        memset(dx + seen, 0, (n - seen) * sizeof(float));
    }
}

struct ggml_tensor * pg_softmax_back(
    struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * y, float scale, bool causal) {
    struct ggml_tensor * args[] = {grad, y};
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, y->ne[0], y->ne[1], y->ne[2], y->ne[3], args, 2, run_softmax_back, GGML_N_TASKS_MAX, NULL);
    set_param_f32(node, 0, scale);
    set_param_i32(node, 1, causal);
    set_param_i32(node, IN_PLACE_PARAM, 1);
    return node;
}

static void run_log_softmax(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct ggml_tensor * x = dst->src[0];
    const int64_t n = x->ne[0];
    int64_t begin, end;
    share_of_work(ggml_nrows(x), 1, ith, nth, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        float * y = (float *) dst->data + i * n;
        const float * row = (const float *) x->data + i * n;
        memcpy(y, row, n * sizeof(float));
        const float top = row_max(y, n);
        const float log_total = (float) log(exp_row(y, n, top));
        for (int64_t j = 0; j < n; j++) { /* one after the other: near 1e8 their sum would lose the logarithm */
            y[j] = row[j] - top - log_total;
        }
    }
}

struct ggml_tensor * pg_log_softmax(struct ggml_context * ctx, struct ggml_tensor * x) {
    struct ggml_tensor * args[] = {x};
    return ggml_custom_4d(
        ctx, GGML_TYPE_F32, x->ne[0], x->ne[1], x->ne[2], x->ne[3], args, 1, run_log_softmax, GGML_N_TASKS_MAX, NULL);
}
