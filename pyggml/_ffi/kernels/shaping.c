/* Elements copied to other places: rearranging, padding, joining, gathering and scattering rows. */

#include "common.h"

static void fill(float * y, float value, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        y[i] = value;
    }
}

/* ---- contiguous ---- */

enum { TILE = 16 }; /* a tile of a transposed matrix fills as many cache lines as it has rows */

/* Copy n_rows rows of n elements, whose axes have these strides, in elements, to where they are contiguous. */
static void copy_matrix(const int32_t * x, int64_t across, int64_t down, int32_t * restrict y, int64_t n_rows, int64_t n) {
    if (across == 1) {
        for (int64_t row = 0; row < n_rows; row++) {
            memcpy(y + row * n, x + row * down, n * sizeof(int32_t));
        }
        return;
    }
    for (int64_t top = 0; top < n_rows; top += TILE) {
        for (int64_t left = 0; left < n; left += TILE) {
            for (int64_t row = top; row < MIN(top + TILE, n_rows); row++) {
                for (int64_t j = left; j < MIN(left + TILE, n); j++) {
                    y[row * n + j] = x[row * down + j * across];
                }
            }
        }
    }
}

static void run_contiguous(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct ggml_tensor * src = dst->src[0];
    const int64_t n = dst->ne[0], height = dst->ne[1], item = sizeof(int32_t);
    int64_t row, end;
    share_of_work(ggml_nrows(dst), TILE, ith, nth, &row, &end);
    while (row < end) {
        const int64_t i1 = row % height, i2 = row / height % dst->ne[2], i3 = row / (height * dst->ne[2]);
        const int64_t n_rows = MIN(height - i1, end - row);
        const char * x = (const char *) src->data + i1 * src->nb[1] + i2 * src->nb[2] + i3 * src->nb[3];
        copy_matrix(
            (const int32_t *) x, (int64_t) src->nb[0] / item, (int64_t) src->nb[1] / item, (int32_t *) dst->data + row * n, n_rows,
            n);
        row += n_rows;
    }
}

struct ggml_tensor * pg_contiguous(struct ggml_context * ctx, struct ggml_tensor * x) {
    struct ggml_tensor * args[] = {x};
    return ggml_custom_4d(
        ctx, x->type, x->ne[0], x->ne[1], x->ne[2], x->ne[3], args, 1, run_contiguous, GGML_N_TASKS_MAX, NULL);
}

/* ---- pad ---- */

static void run_pad(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct ggml_tensor * src = dst->src[0];
    const int64_t width = dst->ne[0], n = src->ne[0], before = get_param_i32(dst, 0), step = get_param_i32(dst, 4);
    const int64_t after = width - before - (n - 1) * step - 1;
    const float value = get_param_f32(dst, 8);
    int64_t begin, end;
    share_of_work(ggml_nrows(dst), 1, ith, nth, &begin, &end);
    for (int64_t row = begin; row < end; row++) {
        float * y = (float *) dst->data + row * width;
        int64_t rest = row, offset = 0;
        bool filled = false; /* whether no row of x comes here */
        for (int i = 1; i < GGML_MAX_DIMS; i++) {
            const int64_t at = rest % dst->ne[i] - get_param_i32(dst, i), spread = get_param_i32(dst, 4 + i);
            filled = filled || at < 0 || at % spread != 0 || at / spread >= src->ne[i];
            offset += at / spread * (int64_t) src->nb[i];
            rest /= dst->ne[i];
        }
        if (filled) {
            fill(y, value, width);
            continue;
        }
        const char * x = (const char *) src->data + offset;
        if (step == 1 && src->nb[0] == sizeof(float)) {
            fill(y, value, before);
            memcpy(y + before, x, n * sizeof(float));
            fill(y + before + n, value, after);
        } else {
            fill(y, value, width);
            for (int64_t i = 0; i < n; i++) {
                y[before + i * step] = *(const float *) (x + i * src->nb[0]);
            }
        }
    }
}

struct ggml_tensor * pg_pad(
    struct ggml_context * ctx, struct ggml_tensor * x, const int64_t * ne, const int64_t * before, const int64_t * step,
    float value) {
    struct ggml_tensor * args[] = {x};
    struct ggml_tensor * node =
        ggml_custom_4d(ctx, GGML_TYPE_F32, ne[0], ne[1], ne[2], ne[3], args, 1, run_pad, GGML_N_TASKS_MAX, NULL);
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        set_param_i32(node, i, (int32_t) before[i]);
        set_param_i32(node, 4 + i, (int32_t) step[i]);
    }
    set_param_f32(node, 8, value);
    return node;
}

/* ---- concat ---- */

/* Each worker writes one stretch of the output, in which every part is contiguous within each entry before the joined axis. */
static void run_concat(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const int axis = get_param_i32(dst, 0);
    int64_t block = 1, position, end;
    for (int i = 0; i <= axis; i++) {
        block *= dst->ne[i];
    }
    share_of_work(ggml_nelements(dst), CACHE_LINE, ith, nth, &position, &end);
    while (position < end) {
        const int64_t outer = position / block;
        int64_t within = position % block, length = 0;
        int part = 0;
        for (;; part++) {
            length = 1;
            for (int i = 0; i <= axis; i++) {
                length *= dst->src[part]->ne[i];
            }
            if (within < length) {
                break;
            }
            within -= length;
        }
        const int64_t n = MIN(length - within, end - position);
        const int32_t * x = (const int32_t *) dst->src[part]->data + outer * length + within;
        memcpy((int32_t *) dst->data + position, x, n * sizeof(int32_t));
        position += n;
    }
}

struct ggml_tensor * pg_concat(struct ggml_context * ctx, struct ggml_tensor ** parts, int n, int axis) {
    int64_t ne[GGML_MAX_DIMS];
    memcpy(ne, parts[0]->ne, sizeof ne);
    for (int i = 1; i < n; i++) {
        ne[axis] += parts[i]->ne[axis];
    }
    struct ggml_tensor * node =
        ggml_custom_4d(ctx, parts[0]->type, ne[0], ne[1], ne[2], ne[3], parts, n, run_concat, GGML_N_TASKS_MAX, NULL);
    set_param_i32(node, 0, axis);
    return node;
}

/* ---- take and scatter ---- */

/* The sizes around an axis of a contiguous tensor: (outer, n, inner). */
static int64_t inner_size(const struct ggml_tensor * t, int axis) {
    int64_t inner = 1;
    for (int i = 0; i < axis; i++) {
        inner *= t->ne[i];
    }
    return inner;
}

static void run_take(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const int axis = get_param_i32(dst, 0);
    const struct ggml_tensor * src = dst->src[0];
    const int32_t * indices = dst->src[1]->data, * x = src->data;
    const int64_t inner = inner_size(src, axis), size = src->ne[axis], count = dst->ne[axis];
    int32_t * y = dst->data;
    int64_t begin, end;
    share_of_work(ggml_nelements(dst) / inner, inner < CACHE_LINE ? CACHE_LINE : 1, ith, nth, &begin, &end);
    for (int64_t row = begin; row < end; row++) {
        const int64_t from = row / count * size + indices[row % count];
        if (inner == 1) {
            y[row] = x[from];
        } else {
            memcpy(y + row * inner, x + from * inner, inner * sizeof(int32_t));
        }
    }
}

struct ggml_tensor * pg_take(struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * indices, int axis) {
    struct ggml_tensor * args[] = {x, indices};
    int64_t ne[GGML_MAX_DIMS];
    memcpy(ne, x->ne, sizeof ne);
    ne[axis] = ggml_nelements(indices);
    struct ggml_tensor * node =
        ggml_custom_4d(ctx, x->type, ne[0], ne[1], ne[2], ne[3], args, 2, run_take, GGML_N_TASKS_MAX, NULL);
    set_param_i32(node, 0, axis);
    return node;
}

/* Every element of the output belongs to one worker, which adds what comes there in the order of the indices: any number of
 * workers gives the same bits. */
static void run_scatter(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const int axis = get_param_i32(dst, 0);
    const struct ggml_tensor * src = dst->src[0];
    const int32_t * indices = dst->src[1]->data;
    const int64_t inner = inner_size(dst, axis), size = dst->ne[axis], count = src->ne[axis];
    const int64_t outer = ggml_nelements(dst) / (size * inner);
    int64_t first = 0, last = outer, left = 0, right = inner;
    bool by_row = false; /* rows are dealt out one by one, for indices often favour small ones */
    if (outer >= nth) {
        share_of_work(outer, 1, ith, nth, &first, &last);
    } else if (inner >= nth * 2 * CACHE_LINE) {
        share_of_work(inner, CACHE_LINE, ith, nth, &left, &right);
    } else {
        by_row = true;
    }
    for (int64_t o = first; o < last; o++) {
        const float * g = (const float *) src->data + o * count * inner;
        float * y = (float *) dst->data + o * size * inner;
        for (int64_t row = by_row ? ith : 0; row < size; row += by_row ? nth : 1) {
            fill(y + row * inner + left, 0.0f, right - left);
        }
        for (int64_t j = 0; j < count; j++) {
            const int64_t row = indices[j];
            if (by_row && row % nth != ith) {
                continue;
            }
            for (int64_t i = left; i < right; i++) {
                y[row * inner + i] += g[j * inner + i];
            }
        }
    }
}

struct ggml_tensor * pg_scatter(
    struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * indices, int axis, int64_t size) {
    struct ggml_tensor * args[] = {grad, indices};
    int64_t ne[GGML_MAX_DIMS];
    memcpy(ne, grad->ne, sizeof ne);
    ne[axis] = size;
    struct ggml_tensor * node =
        ggml_custom_4d(ctx, GGML_TYPE_F32, ne[0], ne[1], ne[2], ne[3], args, 2, run_scatter, GGML_N_TASKS_MAX, NULL);
    set_param_i32(node, 0, axis);
    return node;
}
