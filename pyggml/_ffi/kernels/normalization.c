/* Softmax along rows, and normalisation of channels to mean 0 and variance 1. */

#include "common.h"

/* Sums run in single precision over a block, in double over the blocks: long rows lose no accuracy, and both parts vectorise. */
enum { BLOCK = 256 };

/* ---- softmax ---- */

/* y = scale * x + mask; returns the largest element, -inf for a row of NaN. */
static float score_row(float * restrict y, const float * restrict x, const float * restrict mask, int64_t n, float scale) {
    float top = -INFINITY;
    if (mask == NULL) {
#pragma omp simd reduction(max : top)
        for (int64_t j = 0; j < n; j++) {
            const float v = x[j] * scale;
            y[j] = v;
            top = v > top ? v : top;
        }
    } else {
#pragma omp simd reduction(max : top)
        for (int64_t j = 0; j < n; j++) {
            const float v = x[j] * scale + mask[j];
            y[j] = v;
            top = v > top ? v : top;
        }
    }
    return top;
}

/* y = e^(y - shift), with zeros instead of denormal numbers, which are slow; returns the sum. */
static double exp_row(float * y, int64_t n, float shift) {
    double total = 0.0;
    for (int64_t b = 0; b < n; b += BLOCK) {
        const int64_t last = MIN(b + BLOCK, n);
        float part = 0.0f;
#pragma omp simd reduction(+ : part)
        for (int64_t j = b; j < last; j++) {
            const float v = y[j] - shift, e = fast_expf(v < -87.0f ? -87.0f : v);
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
        const float top = score_row(y, (const float *) x->data + i * n, m, seen, scale);
        const bool all_masked = m != NULL && top == -INFINITY;
        const double total = exp_row(y, seen, all_masked ? 0.0f : top);
        const float factor = all_masked && total == 0.0 ? 0.0f : (float) (1.0 / total);
        for (int64_t j = 0; j < seen; j++) {
            y[j] *= factor;
        }
        memset(y + seen, 0, (n - seen) * sizeof(float));
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
        const float * restrict g = (const float *) grad->data + i * n, * restrict y = (const float *) dst->src[1]->data + i * n;
        float * restrict dx = (float *) dst->data + i * n;
        const int64_t seen = causal ? causal_limit(grad, i) : n;
        const float dot = (float) dot_row(g, y, seen);
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
        const float top = score_row(y, row, NULL, n, 1.0f);
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

/* ---- normalisation ----
 *
 * x is (outer, channels, inner), each channel normalised over outer and inner. Rows of a matrix are outer = 1; the columns of
 * one, inner = 1, take a loop of their own, which runs along the rows. A centred norm subtracts the mean, the other (RMS) does
 * not. The gradient is rstd * (g - mean(g) - y * mean(g * y)), with the statistics computed anew: that costs less than storing
 * and reading them.
 *
 * Weight and bias are (period, segments): an element holds for a run of places in inner, which has as many runs as segments, and
 * channel c takes row c % period. Batch norm has a weight for each channel: one segment. Layer norm has one for each place:
 * runs of 1, period 1. In a group norm each channel of the group is a segment. More than one segment takes outer = 1. */

struct layout {
    int64_t outer, channels, inner, run, segments, period;
    float   eps;
    bool    centered;
};

static void set_layout(
    struct ggml_tensor * node, int64_t outer, int64_t inner, int64_t run, int64_t weights, float eps, bool centered) {
    set_param_i32(node, 0, (int32_t) outer);
    set_param_i32(node, 1, (int32_t) inner);
    set_param_i32(node, 2, (int32_t) (weights > 0 ? run : inner));
    set_param_i32(node, 3, (int32_t) weights);
    set_param_f32(node, 4, eps);
    set_param_i32(node, 5, centered);
}

static struct layout get_layout(const struct ggml_tensor * node, const struct ggml_tensor * x) {
    struct layout l = {
        .outer = get_param_i32(node, 0), .inner = get_param_i32(node, 1), .run = get_param_i32(node, 2),
        .eps = get_param_f32(node, 4), .centered = get_param_i32(node, 5)};
    l.channels = ggml_nelements(x) / (l.outer * l.inner);
    l.segments = l.inner / l.run;
    l.period   = get_param_i32(node, 3) > 0 ? get_param_i32(node, 3) / l.segments : l.channels;
    return l;
}

/* Whether the channels are columns, each with a weight of its own if any. */
static bool are_columns(const struct layout * l) {
    return l->inner == 1 && l->period == l->channels;
}

static const float * data_or_null(const struct ggml_tensor * t) {
    return t == NULL ? NULL : t->data;
}

static double sum_run(const float * x, int64_t n) {
    double total = 0.0;
    for (int64_t b = 0; b < n; b += BLOCK) {
        const int64_t last = MIN(b + BLOCK, n);
        float part = 0.0f;
#pragma omp simd reduction(+ : part)
        for (int64_t j = b; j < last; j++) {
            part += x[j];
        }
        total += part;
    }
    return total;
}

/* Sum of (x - mean) * (y - mean_y). */
static double product_run(const float * x, float mean, const float * y, float mean_y, int64_t n) {
    double total = 0.0;
    for (int64_t b = 0; b < n; b += BLOCK) {
        const int64_t last = MIN(b + BLOCK, n);
        float part = 0.0f;
#pragma omp simd reduction(+ : part)
        for (int64_t j = b; j < last; j++) {
            part += (x[j] - mean) * (y[j] - mean_y);
        }
        total += part;
    }
    return total;
}

static float channel_mean(const float * x, const struct layout * l) {
    double sum = 0.0;
    for (int64_t o = 0; l->centered && o < l->outer; o++) {
        sum += sum_run(x + o * l->channels * l->inner, l->inner);
    }
    return (float) (sum / (double) (l->outer * l->inner));
}

/* Mean of (x - mean) * (y - mean_y). */
static double channel_product(const float * x, float mean, const float * y, float mean_y, const struct layout * l) {
    double sum = 0.0;
    for (int64_t o = 0; o < l->outer; o++) {
        const int64_t at = o * l->channels * l->inner;
        sum += product_run(x + at, mean, y + at, mean_y, l->inner);
    }
    return sum / (double) (l->outer * l->inner);
}

static void norm_channels(
    float * y, const float * x, const float * weight, const float * bias, const struct layout * l, int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++) {
        const float * from = x + c * l->inner;
        const float * w = weight == NULL ? NULL : weight + c % l->period * l->segments;
        const float * b = bias == NULL ? NULL : bias + c % l->period * l->segments;
        const float mean = channel_mean(from, l);
        const float rstd = (float) (1.0 / sqrt(channel_product(from, mean, from, mean, l) + l->eps));
        if (w != NULL && l->run == 1) {
            float * to = y + c * l->inner;
            for (int64_t j = 0; j < l->inner; j++) {
                to[j] = (from[j] - mean) * rstd * w[j] + (b == NULL ? 0.0f : b[j]);
            }
            continue;
        }
        for (int64_t i = 0; i < l->outer * l->segments; i++) {
            const int64_t s = i % l->segments, at = (i / l->segments * l->channels + c) * l->inner + s * l->run;
            const float scale = w == NULL ? rstd : rstd * w[s], shift = b == NULL ? 0.0f : b[s];
            for (int64_t j = at; j < at + l->run; j++) {
                y[j] = (x[j] - mean) * scale + shift;
            }
        }
    }
}

/* h = g * weight, of one channel. */
static void weigh_channel(float * h, const float * g, const float * w, const struct layout * l) {
    if (l->run == 1) {
        for (int64_t j = 0; j < l->inner; j++) {
            h[j] = g[j] * w[j];
        }
        return;
    }
    for (int64_t s = 0; s < l->segments; s++) {
        for (int64_t j = s * l->run; j < (s + 1) * l->run; j++) {
            h[j] = g[j] * w[s];
        }
    }
}

static void norm_back_channels(
    float * dx, const float * g, const float * x, const float * weight, const struct layout * l, int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++) {
        const int64_t first = c * l->inner;
        const float * h = g; /* the gradient of y before it was weighted, or in proportion to it */
        float scale = 1.0f;
        if (weight != NULL && l->segments == 1) {
            scale = weight[c % l->period];
        } else if (weight != NULL) {
            weigh_channel(dx + first, g + first, weight + c % l->period * l->segments, l);
            h = dx;
        }
        const float mean = channel_mean(x + first, l), mean_h = channel_mean(h + first, l);
        const double variance = channel_product(x + first, mean, x + first, mean, l) + l->eps;
        const float tilt = (float) (channel_product(x + first, mean, h + first, mean_h, l) / variance);
        scale *= (float) (1.0 / sqrt(variance));
        for (int64_t o = 0; o < l->outer; o++) {
            const int64_t at = o * l->channels * l->inner + first;
#pragma omp simd
            for (int64_t j = at; j < at + l->inner; j++) {
                dx[j] = scale * (h[j] - mean_h - (x[j] - mean) * tilt);
            }
        }
    }
}

/* The gradient in rows [begin, end) of the weight: sums of g * (x - mean) * rstd over channels, outer, and runs. */
static void norm_dot_channels(
    float * dw, const float * g, const float * x, const struct layout * l, int64_t begin, int64_t end) {
    memset(dw + begin * l->segments, 0, (end - begin) * l->segments * sizeof(float));
    for (int64_t row = begin; row < end; row++) {
        for (int64_t c = row; c < l->channels; c += l->period) {
            const float mean = channel_mean(x + c * l->inner, l);
            const double variance = channel_product(x + c * l->inner, mean, x + c * l->inner, mean, l) + l->eps;
            for (int64_t s = 0; s < l->segments; s++) {
                double sum = 0.0;
                for (int64_t o = 0; o < l->outer; o++) {
                    const int64_t at = (o * l->channels + c) * l->inner + s * l->run;
                    sum += product_run(x + at, mean, g + at, 0.0f, l->run);
                }
                dw[row * l->segments + s] += (float) (sum / sqrt(variance));
            }
        }
    }
}

/* The same for a weight for each place: a row of sums for each block of channels, to be added up. */
static void norm_dot_places(
    float * dw, const float * g, const float * x, const struct layout * l, int64_t blocks, int64_t begin, int64_t end) {
    const int64_t per_block = (l->channels + blocks - 1) / blocks;
    memset(dw + begin * l->inner, 0, (end - begin) * l->inner * sizeof(float));
    for (int64_t b = begin; b < end; b++) {
        float * restrict sums = dw + b * l->inner;
        for (int64_t c = b * per_block; c < MIN((b + 1) * per_block, l->channels); c++) {
            const float * from = x + c * l->inner, * slopes = g + c * l->inner;
            const float mean = channel_mean(from, l);
            const float rstd = (float) (1.0 / sqrt(channel_product(from, mean, from, mean, l) + l->eps));
            for (int64_t j = 0; j < l->inner; j++) {
                sums[j] += slopes[j] * ((from[j] - mean) * rstd);
            }
        }
    }
}

enum { STRIP = 64, STRIP_ROWS = 32 }; /* columns that are worked on together; rows added up in single precision */

static void strip_mean(const float * x, const struct layout * l, int64_t n, float mean[STRIP]) {
    double sum[STRIP] = {0.0};
    for (int64_t b = 0; l->centered && b < l->outer; b += STRIP_ROWS) {
        float part[STRIP] = {0.0f};
        for (int64_t o = b; o < MIN(b + STRIP_ROWS, l->outer); o++) {
            for (int64_t j = 0; j < n; j++) {
                part[j] += x[o * l->channels + j];
            }
        }
        for (int64_t j = 0; j < n; j++) {
            sum[j] += part[j];
        }
    }
    for (int64_t j = 0; j < n; j++) {
        mean[j] = (float) (sum[j] / (double) l->outer);
    }
}

static void strip_product(
    const float * x, const float mean[STRIP], const float * y, const float mean_y[STRIP], const struct layout * l, int64_t n,
    double product[STRIP]) {
    double sum[STRIP] = {0.0};
    for (int64_t b = 0; b < l->outer; b += STRIP_ROWS) {
        float part[STRIP] = {0.0f};
        for (int64_t o = b; o < MIN(b + STRIP_ROWS, l->outer); o++) {
            for (int64_t j = 0; j < n; j++) {
                part[j] += (x[o * l->channels + j] - mean[j]) * (y[o * l->channels + j] - mean_y[j]);
            }
        }
        for (int64_t j = 0; j < n; j++) {
            sum[j] += part[j];
        }
    }
    for (int64_t j = 0; j < n; j++) {
        product[j] = sum[j] / (double) l->outer;
    }
}

static void norm_columns(
    float * y, const float * x, const float * weight, const float * bias, const struct layout * l, int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c += STRIP) {
        const int64_t n = MIN(STRIP, end - c);
        float mean[STRIP], scale[STRIP], shift[STRIP];
        double variance[STRIP];
        strip_mean(x + c, l, n, mean);
        strip_product(x + c, mean, x + c, mean, l, n, variance);
        for (int64_t j = 0; j < n; j++) {
            scale[j] = (float) (1.0 / sqrt(variance[j] + l->eps)) * (weight == NULL ? 1.0f : weight[c + j]);
            shift[j] = bias == NULL ? 0.0f : bias[c + j];
        }
        for (int64_t o = 0; o < l->outer; o++) {
            const float * from = x + o * l->channels + c;
            float * to = y + o * l->channels + c;
            for (int64_t j = 0; j < n; j++) {
                to[j] = (from[j] - mean[j]) * scale[j] + shift[j];
            }
        }
    }
}

static void norm_back_columns(
    float * dx, const float * g, const float * x, const float * weight, const struct layout * l, int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c += STRIP) {
        const int64_t n = MIN(STRIP, end - c);
        float mean[STRIP], mean_g[STRIP], tilt[STRIP], scale[STRIP];
        double variance[STRIP], product[STRIP];
        strip_mean(x + c, l, n, mean);
        strip_mean(g + c, l, n, mean_g);
        strip_product(x + c, mean, x + c, mean, l, n, variance);
        strip_product(x + c, mean, g + c, mean_g, l, n, product);
        for (int64_t j = 0; j < n; j++) {
            tilt[j]  = (float) (product[j] / (variance[j] + l->eps));
            scale[j] = (float) (1.0 / sqrt(variance[j] + l->eps)) * (weight == NULL ? 1.0f : weight[c + j]);
        }
        for (int64_t o = 0; o < l->outer; o++) {
            const int64_t at = o * l->channels + c;
            for (int64_t j = 0; j < n; j++) {
                dx[at + j] = scale[j] * (g[at + j] - mean_g[j] - (x[at + j] - mean[j]) * tilt[j]);
            }
        }
    }
}

static void norm_dot_columns(
    float * dw, const float * g, const float * x, const struct layout * l, int64_t begin, int64_t end) {
    const float zeros[STRIP] = {0.0f};
    for (int64_t c = begin; c < end; c += STRIP) {
        const int64_t n = MIN(STRIP, end - c);
        float mean[STRIP];
        double variance[STRIP], product[STRIP];
        strip_mean(x + c, l, n, mean);
        strip_product(x + c, mean, x + c, mean, l, n, variance);
        strip_product(x + c, mean, g + c, zeros, l, n, product);
        for (int64_t j = 0; j < n; j++) {
            dw[c + j] = (float) (product[j] * (double) l->outer / sqrt(variance[j] + l->eps));
        }
    }
}

static void run_norm(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct layout l = get_layout(dst, dst);
    int64_t begin, end;
    share_of_work(l.channels, are_columns(&l) ? CACHE_LINE : 1, ith, nth, &begin, &end);
    (are_columns(&l) ? norm_columns : norm_channels)(
        dst->data, dst->src[0]->data, data_or_null(dst->src[1]), data_or_null(dst->src[2]), &l, begin, end);
}

struct ggml_tensor * pg_norm(
    struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * weight, struct ggml_tensor * bias, int64_t outer,
    int64_t inner, int64_t run, float eps, bool centered) {
    struct ggml_tensor * args[] = {x, weight, bias};
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, x->ne[0], x->ne[1], x->ne[2], x->ne[3], args, 1 + (weight != NULL) + (bias != NULL), run_norm,
        GGML_N_TASKS_MAX, NULL);
    set_layout(node, outer, inner, run, weight == NULL ? 0 : ggml_nelements(weight), eps, centered);
    return node;
}

static void run_norm_back(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct layout l = get_layout(dst, dst);
    int64_t begin, end;
    share_of_work(l.channels, are_columns(&l) ? CACHE_LINE : 1, ith, nth, &begin, &end);
    (are_columns(&l) ? norm_back_columns : norm_back_channels)(
        dst->data, dst->src[0]->data, dst->src[1]->data, data_or_null(dst->src[2]), &l, begin, end);
}

struct ggml_tensor * pg_norm_back(
    struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * x, struct ggml_tensor * weight, int64_t outer,
    int64_t inner, int64_t run, float eps, bool centered) {
    struct ggml_tensor * args[] = {grad, x, weight};
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, x->ne[0], x->ne[1], x->ne[2], x->ne[3], args, 2 + (weight != NULL), run_norm_back,
        GGML_N_TASKS_MAX, NULL);
    set_layout(node, outer, inner, run, weight == NULL ? 0 : ggml_nelements(weight), eps, centered);
    return node;
}

static void run_norm_dot(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const float * g = dst->src[0]->data, * x = dst->src[1]->data;
    const struct layout l = get_layout(dst, dst->src[1]);
    int64_t begin, end;
    if (dst->ne[1] > 1) {
        share_of_work(dst->ne[1], 1, ith, nth, &begin, &end);
        norm_dot_places(dst->data, g, x, &l, dst->ne[1], begin, end);
    } else {
        share_of_work(l.period, are_columns(&l) ? CACHE_LINE : 1, ith, nth, &begin, &end);
        (are_columns(&l) ? norm_dot_columns : norm_dot_channels)(dst->data, g, x, &l, begin, end);
    }
}

enum { DOT_BLOCKS = 32 }; /* not a function of the number of workers, nor is the result */

struct ggml_tensor * pg_norm_dot(
    struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * x, int64_t outer, int64_t inner, int64_t run,
    int64_t weights, float eps, bool centered) {
    struct ggml_tensor * args[] = {grad, x};
    const int64_t channels = ggml_nelements(x) / (outer * inner);
    const int64_t blocks = run == 1 && weights == inner ? MIN(channels, DOT_BLOCKS) : 1;
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, weights, blocks, 1, 1, args, 2, run_norm_dot, GGML_N_TASKS_MAX, NULL);
    set_layout(node, outer, inner, run, weights, eps, centered);
    return blocks > 1 ? pg_sum_middle(ctx, node, 1, inner) : node;
}
