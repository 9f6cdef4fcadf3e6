/* Windows of planes reduced to one element each, plane by plane. */

#include "common.h"

enum {
    STRETCH = 128,  /* output positions at a time */
    BUFFER  = 2048, /* floats, in the first-level cache */
};

struct pool {
    int64_t planes, h, w, oh, ow;
    int64_t kh, kw, stride_h, stride_w, pad_h, pad_w;
};

static struct pool pool_of(const struct ggml_tensor * x, const struct ggml_tensor * y, const struct ggml_tensor * node) {
    return (struct pool) {
        .planes = x->ne[2] * x->ne[3], .h = x->ne[1], .w = x->ne[0], .oh = y->ne[1], .ow = y->ne[0],
        .kh = get_param_i32(node, 0), .kw = get_param_i32(node, 1), .stride_h = get_param_i32(node, 2),
        .stride_w = get_param_i32(node, 3), .pad_h = get_param_i32(node, 4), .pad_w = get_param_i32(node, 5)};
}

static void set_pool(struct ggml_tensor * node, const int32_t * settings) {
    for (int i = 0; i < 6; i++) {
        set_param_i32(node, i, settings[i]);
    }
}

/* Of n output positions from ox on, those whose column j of the window is not in the padding: [*low, *high). Returns the input
 * column of the first position. */
static int64_t inside(const struct pool * v, int64_t ox, int64_t j, int64_t n, int64_t * low, int64_t * high) {
    const int64_t ix = ox * v->stride_w - v->pad_w + j;
    *high = ix >= v->w ? 0 : MIN(n, (v->w - 1 - ix) / v->stride_w + 1);
    *low  = ix < 0 ? MIN((-ix + v->stride_w - 1) / v->stride_w, *high) : 0;
    return ix;
}

/* ---- max ---- */

/* The largest element of n windows in a row of outputs, and where in the plane it is. Windows with NaN come out wrong, unless
 * careful; returns whether there are any. */
static inline bool scan(
    const struct pool * v, const float * restrict plane, int64_t oy, int64_t ox, int64_t n, float * restrict best,
    int32_t * restrict place, bool careful) {
    const int64_t top = oy * v->stride_h - v->pad_h, left = ox * v->stride_w - v->pad_w, stride = v->stride_w;
    int32_t nans = 0;
    for (int64_t t = 0; t < n; t++) {
        best[t]  = -INFINITY;
        place[t] = (int32_t) (MAX(top, 0) * v->w + MAX(left + t * stride, 0)); /* the first that is not padding */
    }
    for (int64_t i = MAX(-top, 0); i < v->kh && top + i < v->h; i++) {
        for (int64_t j = 0; j < v->kw; j++) {
            int64_t low, high;
            const int64_t from = (top + i) * v->w + inside(v, ox, j, n, &low, &high);
            for (int64_t t = low; t < high; t++) {
                const float value = plane[from + t * stride];
                const int32_t is_nan = value != value;
                const bool better = careful ? (value > best[t]) | (is_nan & (best[t] == best[t])) : value > best[t];
                best[t]  = better ? value : best[t];
                place[t] = better ? (int32_t) (from + t * stride) : place[t];
                nans |= is_nan;
            }
        }
    }
    return nans != 0;
}

static void find_max(
    const struct pool * v, const float * plane, int64_t oy, int64_t ox, int64_t n, float * best, int32_t * place) {
    if (scan(v, plane, oy, ox, n, best, place, false)) {
        scan(v, plane, oy, ox, n, best, place, true);
    }
}

/* Windows of 2 by 2 side by side, the usual ones, take a vectorised way: pairs along the rows, then pairs of these. Of equal
 * elements, or NaN, the first one counts. */
static bool is_halving(const struct pool * v) {
    return v->kh == 2 && v->kw == 2 && v->stride_h == 2 && v->stride_w == 2 && v->pad_h == 0 && v->pad_w == 0 &&
           2 * v->ow <= BUFFER;
}

static inline bool stays_largest(float x, float later) {
    return (x >= later) | (x != x);
}

static inline float larger(float x, float later) {
    const float top = x > later ? x : later; /* one instruction, which lets x go if it is NaN */
    return x != x ? x : top;
}

/* The gradient g to one of two, 0 to the other; as bits, for compilers make branches of two choices by one condition. */
static inline void give(float g, bool to_first, float * first, float * second) {
    const int32_t mask = -(int32_t) to_first;
    *first  = float_of_bits(bits_of_float(g) & mask);
    *second = float_of_bits(bits_of_float(g) & ~mask);
}

/* The largest of each pair in n_rows rows of a plane: (n_rows, ow). */
static void halve_rows(const struct pool * v, const float * x, int64_t n_rows, float * restrict y) {
    const bool dense = v->w == 2 * v->ow; /* then all rows are one */
    const int64_t n = dense ? n_rows * v->ow : v->ow;
    for (int64_t row = 0; row < (dense ? 1 : n_rows); row++, x += v->w, y += v->ow) {
        for (int64_t t = 0; t < n; t++) {
            y[t] = larger(x[2 * t], x[2 * t + 1]);
        }
    }
}

static void halve_rows_back(
    const struct pool * v, const float * restrict g, const float * restrict x, int64_t n_rows, float * restrict dx) {
    const bool dense = v->w == 2 * v->ow;
    const int64_t n = dense ? n_rows * v->ow : v->ow;
    for (int64_t row = 0; row < (dense ? 1 : n_rows); row++, x += v->w, dx += v->w, g += v->ow) {
        for (int64_t t = 0; t < n; t++) {
            give(g[t], stays_largest(x[2 * t], x[2 * t + 1]), &dx[2 * t], &dx[2 * t + 1]);
        }
    }
}

/* Rows [begin, end) of the outputs of all planes. */
static void halve(const struct pool * v, const float * x, float * y, int64_t begin, int64_t end) {
    float pairs[BUFFER];
    for (int64_t row = begin, rows; row < end; row += rows) {
        const int64_t plane = row / v->oh, oy = row % v->oh;
        rows = MIN(MIN(BUFFER / (2 * v->ow), v->oh - oy), end - row);
        halve_rows(v, x + (plane * v->h + 2 * oy) * v->w, 2 * rows, pairs);
        for (int64_t r = 0; r < rows; r++) {
            const float * upper = pairs + 2 * r * v->ow, * lower = upper + v->ow;
            float * restrict to = y + (row + r) * v->ow;
            for (int64_t t = 0; t < v->ow; t++) {
                to[t] = larger(upper[t], lower[t]);
            }
        }
    }
}

/* Whole planes [begin, end). */
static void halve_back(const struct pool * v, const float * grad, const float * x, float * dx, int64_t begin, int64_t end) {
    float pairs[BUFFER], slopes[BUFFER];
    for (int64_t plane = begin; plane < end; plane++) {
        const int64_t start = plane * v->h * v->w;
        if (v->h % 2 != 0 || v->w % 2 != 0) {
            memset(dx + start, 0, v->h * v->w * sizeof(float));
        }
        for (int64_t oy = 0, rows; oy < v->oh; oy += rows) {
            const int64_t at = start + 2 * oy * v->w;
            rows = MIN(BUFFER / (2 * v->ow), v->oh - oy);
            halve_rows(v, x + at, 2 * rows, pairs);
            for (int64_t r = 0; r < rows; r++) {
                const float * restrict g = grad + (plane * v->oh + oy + r) * v->ow;
                const float * restrict upper = pairs + 2 * r * v->ow;
                float * restrict slope = slopes + 2 * r * v->ow;
                for (int64_t t = 0; t < v->ow; t++) {
                    give(g[t], stays_largest(upper[t], upper[v->ow + t]), &slope[t], &slope[v->ow + t]);
                }
            }
            halve_rows_back(v, slopes, x + at, 2 * rows, dx + at);
        }
    }
}

static void run_max_pool(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const float * values = dst->src[0]->data, * x = dst->src[1]->data;
    const struct pool v = pool_of(dst->src[1], dst, dst);
    float best[STRETCH];
    int32_t place[STRETCH];
    int64_t begin, end;
    share_of_work(v.planes * v.oh, 1, ith, nth, &begin, &end);
    if (values == x && is_halving(&v)) {
        halve(&v, x, dst->data, begin, end);
        return;
    }
    for (int64_t row = begin; row < end; row++) {
        const int64_t plane = row / v.oh * v.h * v.w;
        for (int64_t ox = 0; ox < v.ow; ox += STRETCH) {
            const int64_t n = MIN(STRETCH, v.ow - ox);
            float * y = (float *) dst->data + row * v.ow + ox;
            find_max(&v, x + plane, row % v.oh, ox, n, values == x ? y : best, place);
            for (int64_t t = 0; t < n && values != x; t++) {
                y[t] = values[plane + place[t]];
            }
        }
    }
}

struct ggml_tensor * pg_max_pool(
    struct ggml_context * ctx, struct ggml_tensor * values, struct ggml_tensor * x, int64_t oh, int64_t ow,
    const int32_t * settings) {
    struct ggml_tensor * args[] = {values, x};
    struct ggml_tensor * node =
        ggml_custom_4d(ctx, GGML_TYPE_F32, ow, oh, x->ne[2], x->ne[3], args, 2, run_max_pool, GGML_N_TASKS_MAX, NULL);
    set_pool(node, settings);
    return node;
}

static void run_max_pool_back(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const float * grad = dst->src[0]->data, * x = dst->src[1]->data;
    const struct pool v = pool_of(dst, dst->src[0], dst);
    float best[STRETCH];
    int32_t place[STRETCH];
    int64_t begin, end;
    share_of_work(v.planes, 1, ith, nth, &begin, &end);
    if (is_halving(&v)) {
        halve_back(&v, grad, x, dst->data, begin, end);
        return;
    }
    for (int64_t p = begin; p < end; p++) {
        float * dx = (float *) dst->data + p * v.h * v.w;
        memset(dx, 0, v.h * v.w * sizeof(float));
        for (int64_t oy = 0; oy < v.oh; oy++) {
            for (int64_t ox = 0; ox < v.ow; ox += STRETCH) {
                const int64_t n = MIN(STRETCH, v.ow - ox);
                const float * g = grad + (p * v.oh + oy) * v.ow + ox;
                find_max(&v, x + p * v.h * v.w, oy, ox, n, best, place);
                for (int64_t t = 0; t < n; t++) {
                    dx[place[t]] += g[t];
                }
            }
        }
    }
}

struct ggml_tensor * pg_max_pool_back(
    struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * x, const int32_t * settings) {
    struct ggml_tensor * args[] = {grad, x};
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, x->ne[0], x->ne[1], x->ne[2], x->ne[3], args, 2, run_max_pool_back, GGML_N_TASKS_MAX, NULL);
    set_pool(node, settings);
    return node;
}

/* ---- mean ---- */

static void run_avg_pool(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct pool v = pool_of(dst->src[0], dst, dst);
    const float scale = 1.0f / (float) (v.kh * v.kw);
    int64_t begin, end;
    share_of_work(v.planes * v.oh, 1, ith, nth, &begin, &end);
    for (int64_t row = begin; row < end; row++) {
        const float * plane = (const float *) dst->src[0]->data + row / v.oh * v.h * v.w;
        float * y = (float *) dst->data + row * v.ow;
        memset(y, 0, v.ow * sizeof(float));
        for (int64_t i = 0; i < v.kh; i++) {
            const int64_t iy = row % v.oh * v.stride_h - v.pad_h + i;
            for (int64_t j = 0; j < v.kw && iy >= 0 && iy < v.h; j++) {
                int64_t low, high;
                const int64_t from = iy * v.w + inside(&v, 0, j, v.ow, &low, &high), stride = v.stride_w;
                for (int64_t t = low; t < high; t++) {
                    y[t] += plane[from + t * stride];
                }
            }
        }
        for (int64_t t = 0; t < v.ow; t++) {
            y[t] *= scale;
        }
    }
}

struct ggml_tensor * pg_avg_pool(
    struct ggml_context * ctx, struct ggml_tensor * x, int64_t oh, int64_t ow, const int32_t * settings) {
    struct ggml_tensor * args[] = {x};
    struct ggml_tensor * node =
        ggml_custom_4d(ctx, GGML_TYPE_F32, ow, oh, x->ne[2], x->ne[3], args, 1, run_avg_pool, GGML_N_TASKS_MAX, NULL);
    set_pool(node, settings);
    return node;
}

static void run_avg_pool_back(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct pool v = pool_of(dst, dst->src[0], dst);
    const float scale = 1.0f / (float) (v.kh * v.kw);
    int64_t begin, end;
    share_of_work(v.planes, 1, ith, nth, &begin, &end);
    for (int64_t p = begin; p < end; p++) {
        float * dx = (float *) dst->data + p * v.h * v.w;
        memset(dx, 0, v.h * v.w * sizeof(float));
        for (int64_t oy = 0; oy < v.oh; oy++) {
            const float * g = (const float *) dst->src[0]->data + (p * v.oh + oy) * v.ow;
            for (int64_t i = 0; i < v.kh; i++) {
                const int64_t iy = oy * v.stride_h - v.pad_h + i;
                for (int64_t j = 0; j < v.kw && iy >= 0 && iy < v.h; j++) {
                    int64_t low, high;
                    const int64_t to = iy * v.w + inside(&v, 0, j, v.ow, &low, &high), stride = v.stride_w;
                    for (int64_t t = low; t < high; t++) {
                        dx[to + t * stride] += g[t] * scale;
                    }
                }
            }
        }
    }
}

struct ggml_tensor * pg_avg_pool_back(
    struct ggml_context * ctx, struct ggml_tensor * grad, int64_t h, int64_t w, const int32_t * settings) {
    struct ggml_tensor * args[] = {grad};
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, w, h, grad->ne[2], grad->ne[3], args, 1, run_avg_pool_back, GGML_N_TASKS_MAX, NULL);
    set_pool(node, settings);
    return node;
}
