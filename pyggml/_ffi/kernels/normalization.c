/* Normalisation of channels to mean 0 and variance 1. */

#include "rows.h"

/* x is (outer, channels, inner), each channel normalised over outer and inner. A centred norm subtracts the mean, the other (RMS)
 * does not. The gradient is rstd * (h - mean(h) - y * mean(h * y)), h being the gradient times the weight.
 *
 * Weight and bias are (period, segments): an element holds for a run of places in inner, which has as many runs as segments, and
 * channel c takes row c % period. Batch norm has a weight for each channel: one segment. Layer norm has one for each place:
 * runs of 1, period 1. In a group norm each channel of the group is a segment. More than one segment takes outer = 1.
 *
 * Channels that are rows of a matrix (layer norm) stay in the first-level cache while all is computed that they need. Others
 * take two passes over memory: one for statistics, small tensors that several nodes read, and one for the result. The columns
 * of a matrix, inner = 1, take loops of their own, which run along the rows. */

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

/* Up to three parts of a node's inputs that may be missing: which ones are there is a parameter of the node. */
static struct ggml_tensor * norm_node(
    struct ggml_context * ctx, struct ggml_tensor * like, struct ggml_tensor ** args, int n, ggml_custom_op_t run) {
    struct ggml_tensor * given[GGML_MAX_SRC];
    int count = 0, known = 0;
    for (int i = 0; i < n; i++) {
        if (args[i] != NULL) {
            given[count++] = args[i];
            known |= 1 << i;
        }
    }
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, like->ne[0], like->ne[1], like->ne[2], like->ne[3], given, count, run, GGML_N_TASKS_MAX, NULL);
    set_param_i32(node, 6, known);
    return node;
}

/* The data of argument i of norm_node, or NULL. */
static const float * norm_input(const struct ggml_tensor * node, int i) {
    const int known = get_param_i32(node, 6);
    int place = 0;
    for (int k = 0; k < i; k++) {
        place += known >> k & 1;
    }
    return known >> i & 1 ? node->src[place]->data : NULL;
}

/* ---- rows ---- */

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

static float row_mean(const float * x, const struct layout * l) {
    return l->centered ? (float) (sum_run(x, l->inner) / (double) l->inner) : 0.0f;
}

/* Mean of (x - mean) * (y - mean_y). */
static double row_product(const float * x, float mean, const float * y, float mean_y, const struct layout * l) {
    return product_run(x, mean, y, mean_y, l->inner) / (double) l->inner;
}

static void norm_rows(
    float * y, const float * x, const float * weight, const float * bias, const struct layout * l, int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++) {
        const float * from = x + c * l->inner;
        float * to = y + c * l->inner;
        const float mean = row_mean(from, l), rstd = (float) (1.0 / sqrt(row_product(from, mean, from, mean, l) + l->eps));
        if (weight == NULL) {
            for (int64_t j = 0; j < l->inner; j++) {
                to[j] = (from[j] - mean) * rstd;
            }
        } else if (bias == NULL) {
            for (int64_t j = 0; j < l->inner; j++) {
                to[j] = (from[j] - mean) * rstd * weight[j];
            }
        } else {
            for (int64_t j = 0; j < l->inner; j++) {
                to[j] = (from[j] - mean) * rstd * weight[j] + bias[j];
            }
        }
    }
}

static void norm_back_rows(
    float * dx, const float * g, const float * x, const float * weight, const struct layout * l, int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++) {
        const float * from = x + c * l->inner, * slopes = g + c * l->inner;
        float * to = dx + c * l->inner;
        for (int64_t j = 0; weight != NULL && j < l->inner; j++) {
            to[j] = slopes[j] * weight[j];
        }
        const float * h = weight != NULL ? to : slopes;
        const float mean = row_mean(from, l), mean_h = row_mean(h, l);
        const double variance = row_product(from, mean, from, mean, l) + l->eps;
        const float tilt = (float) (row_product(from, mean, h, mean_h, l) / variance), rstd = (float) (1.0 / sqrt(variance));
#pragma omp simd
        for (int64_t j = 0; j < l->inner; j++) {
            to[j] = rstd * (h[j] - mean_h - (from[j] - mean) * tilt);
        }
    }
}

/* The gradient in a weight for each place: a row of sums for each block of channels, to be added up. */
static void norm_dot_rows(
    float * dw, const float * g, const float * x, const struct layout * l, int64_t blocks, int64_t begin, int64_t end) {
    const int64_t per_block = (l->channels + blocks - 1) / blocks;
    memset(dw + begin * l->inner, 0, (end - begin) * l->inner * sizeof(float));
    for (int64_t b = begin; b < end; b++) {
        float * restrict sums = dw + b * l->inner;
        for (int64_t c = b * per_block; c < MIN((b + 1) * per_block, l->channels); c++) {
            const float * from = x + c * l->inner, * slopes = g + c * l->inner;
            const float mean = row_mean(from, l);
            const float rstd = (float) (1.0 / sqrt(row_product(from, mean, from, mean, l) + l->eps));
            for (int64_t j = 0; j < l->inner; j++) {
                sums[j] += slopes[j] * ((from[j] - mean) * rstd);
            }
        }
    }
}

/* ---- statistics: (2, channels), the means, or zeros if not centred, and the mean squared distances from them ---- */

enum { STRIP = 64, STRIP_ROWS = 32 }; /* columns that are worked on together; rows added up in single precision */

static void strip_mean(const float * x, const struct layout * l, int64_t n, float * mean) {
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

static void strip_variance(const float * x, const float * mean, const struct layout * l, int64_t n, float * variance) {
    double sum[STRIP] = {0.0};
    for (int64_t b = 0; b < l->outer; b += STRIP_ROWS) {
        float part[STRIP] = {0.0f};
        for (int64_t o = b; o < MIN(b + STRIP_ROWS, l->outer); o++) {
            for (int64_t j = 0; j < n; j++) {
                const float d = x[o * l->channels + j] - mean[j];
                part[j] += d * d;
            }
        }
        for (int64_t j = 0; j < n; j++) {
            sum[j] += part[j];
        }
    }
    for (int64_t j = 0; j < n; j++) {
        variance[j] = (float) (sum[j] / (double) l->outer);
    }
}

static void run_norm_statistics(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const float * x = dst->src[0]->data;
    const struct layout l = get_layout(dst, dst->src[0]);
    float * means = dst->data, * variances = means + l.channels;
    int64_t begin, end;
    share_of_work(l.channels, l.inner == 1 ? CACHE_LINE : 1, ith, nth, &begin, &end);
    for (int64_t c = begin; l.inner == 1 && c < end; c += STRIP) {
        strip_mean(x + c, &l, MIN(STRIP, end - c), means + c);
        strip_variance(x + c, means + c, &l, MIN(STRIP, end - c), variances + c);
    }
    for (int64_t c = begin; l.inner > 1 && c < end; c++) {
        double sum = 0.0, squares = 0.0;
        for (int64_t o = 0; l.centered && o < l.outer; o++) {
            sum += sum_run(x + (o * l.channels + c) * l.inner, l.inner);
        }
        const float mean = means[c] = (float) (sum / (double) (l.outer * l.inner));
        for (int64_t o = 0; o < l.outer; o++) {
            const float * from = x + (o * l.channels + c) * l.inner;
            squares += product_run(from, mean, from, mean, l.inner);
        }
        variances[c] = (float) (squares / (double) (l.outer * l.inner));
    }
}

struct ggml_tensor * pg_norm_statistics(
    struct ggml_context * ctx, struct ggml_tensor * x, int64_t outer, int64_t inner, bool centered) {
    struct ggml_tensor * args[] = {x};
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, ggml_nelements(x) / (outer * inner), 2, 1, 1, args, 1, run_norm_statistics, GGML_N_TASKS_MAX, NULL);
    set_layout(node, outer, inner, inner, 0, 0.0f, centered);
    return node;
}

/* ---- sums for the gradients: (2, channels, segments), of g, and of g * (x - mean) ---- */

static void add_sums(const float * g, const float * x, float mean, int64_t n, double * sum, double * product) {
    for (int64_t b = 0; b < n; b += BLOCK) {
        const int64_t last = MIN(b + BLOCK, n);
        float s = 0.0f, p = 0.0f;
#pragma omp simd reduction(+ : s, p)
        for (int64_t j = b; j < last; j++) {
            s += g[j];
            p += g[j] * (x[j] - mean);
        }
        *sum += s;
        *product += p;
    }
}

static void strip_sums(
    const float * g, const float * x, const float * mean, const struct layout * l, int64_t n, float * sums, float * products) {
    double sum[STRIP] = {0.0}, product[STRIP] = {0.0};
    for (int64_t b = 0; b < l->outer; b += STRIP_ROWS) {
        float s[STRIP] = {0.0f}, p[STRIP] = {0.0f};
        for (int64_t o = b; o < MIN(b + STRIP_ROWS, l->outer); o++) {
            for (int64_t j = 0; j < n; j++) {
                const float slope = g[o * l->channels + j];
                s[j] += slope;
                p[j] += slope * (x[o * l->channels + j] - mean[j]);
            }
        }
        for (int64_t j = 0; j < n; j++) {
            sum[j] += s[j];
            product[j] += p[j];
        }
    }
    for (int64_t j = 0; j < n; j++) {
        sums[j]     = (float) sum[j];
        products[j] = (float) product[j];
    }
}

static void run_norm_sums(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const float * g = dst->src[0]->data, * x = dst->src[1]->data, * means = dst->src[2]->data;
    const struct layout l = get_layout(dst, dst->src[1]);
    float * sums = dst->data, * products = sums + l.channels * l.segments;
    int64_t begin, end;
    share_of_work(l.channels, l.inner == 1 ? CACHE_LINE : 1, ith, nth, &begin, &end);
    for (int64_t c = begin; l.inner == 1 && c < end; c += STRIP) {
        strip_sums(g + c, x + c, means + c, &l, MIN(STRIP, end - c), sums + c, products + c);
    }
    for (int64_t i = begin * l.segments; l.inner > 1 && i < end * l.segments; i++) {
        const int64_t c = i / l.segments, s = i % l.segments;
        double sum = 0.0, product = 0.0;
        for (int64_t o = 0; o < l.outer; o++) {
            const int64_t at = (o * l.channels + c) * l.inner + s * l.run;
            add_sums(g + at, x + at, means[c], l.run, &sum, &product);
        }
        sums[i]     = (float) sum;
        products[i] = (float) product;
    }
}

struct ggml_tensor * pg_norm_sums(
    struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * x, struct ggml_tensor * statistics,
    int64_t outer, int64_t inner, int64_t run) {
    struct ggml_tensor * args[] = {grad, x, statistics};
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, inner / run, ggml_nelements(x) / (outer * inner), 2, 1, args, 3, run_norm_sums, GGML_N_TASKS_MAX,
        NULL);
    set_layout(node, outer, inner, run, inner / run, 0.0f, true);
    return node;
}

/* ---- results from statistics and sums ---- */

static float rstd_of(float variance, const struct layout * l) {
    return (float) (1.0 / sqrt((double) variance + l->eps));
}

static void norm_channels(
    float * y, const float * x, const float * statistics, const float * weight, const float * bias, const struct layout * l,
    int64_t begin, int64_t end) {
    for (int64_t i = begin * l->segments; i < end * l->segments; i++) {
        const int64_t c = i / l->segments % l->channels, s = i % l->segments, w = c % l->period * l->segments + s;
        const float mean = statistics[c], rstd = rstd_of(statistics[l->channels + c], l);
        const float scale = weight == NULL ? rstd : rstd * weight[w], shift = bias == NULL ? 0.0f : bias[w];
        for (int64_t j = i * l->run; j < (i + 1) * l->run; j++) {
            y[j] = (x[j] - mean) * scale + shift;
        }
    }
}

static void norm_columns(
    float * y, const float * x, const float * statistics, const float * weight, const float * bias, const struct layout * l,
    int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c += STRIP) {
        const int64_t n = MIN(STRIP, end - c);
        const float * mean = statistics + c, * variance = mean + l->channels;
        float scale[STRIP], shift[STRIP];
        for (int64_t j = 0; j < n; j++) {
            scale[j] = rstd_of(variance[j], l) * (weight == NULL ? 1.0f : weight[(c + j) % l->period]);
            shift[j] = bias == NULL ? 0.0f : bias[(c + j) % l->period];
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

/* What the gradient subtracts from h = g * weight in channel c: mean(h), and tilt * (x - mean). */
static void slope_of_channel(
    const float * statistics, const float * sums, const float * weight, const struct layout * l, int64_t c, float * mean_h,
    float * tilt) {
    const float * products = sums + l->channels * l->segments;
    const double count = (double) (l->outer * l->inner), variance = (double) statistics[l->channels + c] + l->eps;
    double sum = 0.0, product = 0.0;
    for (int64_t s = 0; s < l->segments; s++) {
        const double w = weight == NULL ? 1.0 : weight[c % l->period * l->segments + s];
        sum += w * sums[c * l->segments + s];
        product += w * products[c * l->segments + s];
    }
    *mean_h = l->centered ? (float) (sum / count) : 0.0f;
    *tilt   = (float) (product / count / variance);
}

static void norm_back_channels(
    float * dx, const float * g, const float * x, const float * statistics, const float * sums, const float * weight,
    const struct layout * l, int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; plane++) {
        const int64_t c = plane % l->channels;
        const float mean = statistics[c], rstd = rstd_of(statistics[l->channels + c], l);
        float mean_h, tilt;
        slope_of_channel(statistics, sums, weight, l, c, &mean_h, &tilt);
        for (int64_t s = 0; s < l->segments; s++) {
            const float w = weight == NULL ? 1.0f : weight[c % l->period * l->segments + s];
            const int64_t first = plane * l->inner + s * l->run;
#pragma omp simd
            for (int64_t j = first; j < first + l->run; j++) {
                dx[j] = rstd * (g[j] * w - mean_h - (x[j] - mean) * tilt);
            }
        }
    }
}

static void norm_back_columns(
    float * dx, const float * g, const float * x, const float * statistics, const float * sums, const float * weight,
    const struct layout * l, int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c += STRIP) {
        const int64_t n = MIN(STRIP, end - c);
        const float * mean = statistics + c;
        float mean_h[STRIP], tilt[STRIP], rstd[STRIP], w[STRIP];
        for (int64_t j = 0; j < n; j++) {
            slope_of_channel(statistics, sums, weight, l, c + j, &mean_h[j], &tilt[j]);
            rstd[j] = rstd_of(statistics[l->channels + c + j], l);
            w[j]    = weight == NULL ? 1.0f : weight[(c + j) % l->period];
        }
        for (int64_t o = 0; o < l->outer; o++) {
            const int64_t at = o * l->channels + c;
            for (int64_t j = 0; j < n; j++) {
                dx[at + j] = rstd[j] * (g[at + j] * w[j] - mean_h[j] - (x[at + j] - mean[j]) * tilt[j]);
            }
        }
    }
}

/* ---- nodes ---- */

/* Worker ith's share: of columns, of rows, or of planes (outer, channels). */
static void share_of_channels(const struct layout * l, bool rows, int ith, int nth, int64_t * begin, int64_t * end) {
    if (!rows && l->inner == 1) {
        share_of_work(l->channels, CACHE_LINE, ith, nth, begin, end);
    } else {
        share_of_work(l->outer * l->channels, 1, ith, nth, begin, end);
    }
}

static void run_norm(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const float * x = norm_input(dst, 0), * statistics = norm_input(dst, 1);
    const float * weight = norm_input(dst, 2), * bias = norm_input(dst, 3);
    const struct layout l = get_layout(dst, dst);
    int64_t begin, end;
    share_of_channels(&l, statistics == NULL, ith, nth, &begin, &end);
    if (statistics == NULL) {
        norm_rows(dst->data, x, weight, bias, &l, begin, end);
    } else {
        (l.inner == 1 ? norm_columns : norm_channels)(dst->data, x, statistics, weight, bias, &l, begin, end);
    }
}

struct ggml_tensor * pg_norm(
    struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * statistics, struct ggml_tensor * weight,
    struct ggml_tensor * bias, int64_t outer, int64_t inner, int64_t run, float eps, bool centered) {
    struct ggml_tensor * args[] = {x, statistics, weight, bias};
    struct ggml_tensor * node = norm_node(ctx, x, args, 4, run_norm);
    set_layout(node, outer, inner, run, weight == NULL ? 0 : ggml_nelements(weight), eps, centered);
    return node;
}

static void run_norm_back(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const float * g = norm_input(dst, 0), * x = norm_input(dst, 1);
    const float * statistics = norm_input(dst, 2), * sums = norm_input(dst, 3), * weight = norm_input(dst, 4);
    const struct layout l = get_layout(dst, dst);
    int64_t begin, end;
    share_of_channels(&l, statistics == NULL, ith, nth, &begin, &end);
    if (statistics == NULL) {
        norm_back_rows(dst->data, g, x, weight, &l, begin, end);
    } else {
        (l.inner == 1 ? norm_back_columns : norm_back_channels)(dst->data, g, x, statistics, sums, weight, &l, begin, end);
    }
}

struct ggml_tensor * pg_norm_back(
    struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * x, struct ggml_tensor * statistics,
    struct ggml_tensor * sums, struct ggml_tensor * weight, int64_t outer, int64_t inner, int64_t run, float eps,
    bool centered) {
    struct ggml_tensor * args[] = {grad, x, statistics, sums, weight};
    struct ggml_tensor * node = norm_node(ctx, x, args, 5, run_norm_back);
    set_layout(node, outer, inner, run, weight == NULL ? 0 : ggml_nelements(weight), eps, centered);
    return node;
}

static void run_norm_dot_rows(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct layout l = get_layout(dst, dst->src[1]);
    int64_t begin, end;
    share_of_work(dst->ne[1], 1, ith, nth, &begin, &end);
    norm_dot_rows(dst->data, dst->src[0]->data, dst->src[1]->data, &l, dst->ne[1], begin, end);
}

enum { DOT_BLOCKS = 32 }; /* not a function of the number of workers, nor is the result */

struct ggml_tensor * pg_norm_dot_rows(
    struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * x, int64_t inner, float eps, bool centered) {
    struct ggml_tensor * args[] = {grad, x};
    const int64_t blocks = MIN(ggml_nelements(x) / inner, DOT_BLOCKS);
    struct ggml_tensor * node =
        ggml_custom_4d(ctx, GGML_TYPE_F32, inner, blocks, 1, 1, args, 2, run_norm_dot_rows, GGML_N_TASKS_MAX, NULL);
    set_layout(node, 1, inner, 1, inner, eps, centered);
    return blocks > 1 ? pg_sum_middle(ctx, node, 1, inner) : node;
}

/* From the sums: those of channels that share a weight, each times its rstd. */
static void run_norm_dot(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct ggml_tensor * statistics = dst->src[0], * sums = dst->src[1];
    const struct layout l = {.channels = statistics->ne[0], .segments = sums->ne[0], .eps = get_param_f32(dst, 0)};
    const float * variances = (const float *) statistics->data + l.channels;
    const float * products  = (const float *) sums->data + l.channels * l.segments;
    const int64_t period = dst->ne[0] / l.segments;
    int64_t begin, end;
    share_of_work(dst->ne[0], CACHE_LINE, ith, nth, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        double sum = 0.0;
        for (int64_t c = i / l.segments; c < l.channels; c += period) {
            sum += (double) products[c * l.segments + i % l.segments] * rstd_of(variances[c], &l);
        }
        ((float *) dst->data)[i] = (float) sum;
    }
}

struct ggml_tensor * pg_norm_dot(
    struct ggml_context * ctx, struct ggml_tensor * statistics, struct ggml_tensor * sums, int64_t weights, float eps) {
    struct ggml_tensor * args[] = {statistics, sums};
    struct ggml_tensor * node =
        ggml_custom_4d(ctx, GGML_TYPE_F32, weights, 1, 1, 1, args, 2, run_norm_dot, GGML_N_TASKS_MAX, NULL);
    set_param_f32(node, 0, eps);
    return node;
}
