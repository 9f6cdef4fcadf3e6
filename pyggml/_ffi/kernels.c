/* Kernels for which ggml has no op, or loses by a measured factor (benchmarks/). Declared and described in kernels.h.
 *
 * A kernel is a pair: run_NAME, which every ggml worker calls with its index, and pg_NAME, which makes the graph node. Scalars
 * travel in the node's op_params, behind the 24 bytes that ggml's custom op uses itself. */

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "cblas.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include "kernels.h"

#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

enum { FIRST_FREE_PARAM = 8 }; /* index into op_params, in 4-byte units */

static void set_param_f32(struct ggml_tensor * node, int i, float value) {
    memcpy(&node->op_params[FIRST_FREE_PARAM + i], &value, sizeof value);
}

static float get_param_f32(const struct ggml_tensor * node, int i) {
    float value;
    memcpy(&value, &node->op_params[FIRST_FREE_PARAM + i], sizeof value);
    return value;
}

/* Worker ith's share [*begin, *end) of n items, in whole multiples of grain. */
static void share_of_work(int64_t n, int64_t grain, int ith, int nth, int64_t * begin, int64_t * end) {
    const int64_t chunk = ((n + nth - 1) / nth + grain - 1) / grain * grain;
    *begin = MIN(ith * chunk, n);
    *end   = MIN(*begin + chunk, n);
}

/* e^x to about 1 ulp, written so that compilers vectorise it: x = n ln 2 + r, then a polynomial in r (Cephes' coefficients). */
static inline float fast_expf(float x) {
    const float clamped = x < -104.0f ? -104.0f : x > 88.8f ? 88.8f : x; /* keeps NaN */
    const float n       = rintf(clamped * 1.44269504088896341f);
    float r             = clamped - n * 0.693359375f;
    r                   = r + n * 2.12194440e-4f;
    float p             = 1.9875691500e-4f;
    p                   = p * r + 1.3981999507e-3f;
    p                   = p * r + 8.3334519073e-3f;
    p                   = p * r + 4.1665795894e-2f;
    p                   = p * r + 1.6666665459e-1f;
    p                   = p * r + 5.0000001201e-1f;
    p                   = p * r * r + r + 1.0f;
    /* 2^n in two factors, so that neither leaves the range of a float */
    const int32_t ni = (n == n) ? (int32_t) n : 0, half = ni >> 1;
    union { int32_t i; float f; } lo = {(half + 127) << 23}, hi = {(ni - half + 127) << 23};
    return p * lo.f * hi.f;
}

/* ---- matmul -------------------------------------------------------------------------------------------------------------- */

/* One operand's matrix as sgemm wants it: row-major, or transposed when its first axis is the contiguous one. */
struct matrix {
    enum CBLAS_TRANSPOSE trans;
    blasint              ld;
};

static struct matrix matrix_of(const struct ggml_tensor * t) {
    const bool rows = t->nb[0] == sizeof(float);
    const size_t stride = rows ? t->nb[1] : t->nb[0];
    const int64_t width = rows ? t->ne[0] : t->ne[1];
    return (struct matrix) {rows ? CblasNoTrans : CblasTrans, (blasint) MAX((int64_t) (stride / sizeof(float)), MAX(width, 1))};
}

static const float * batch_item(const struct ggml_tensor * t, int64_t i2, int64_t i3) {
    return (const float *) ((const char *) t->data + (t->ne[2] > 1 ? i2 * t->nb[2] : 0) + (t->ne[3] > 1 ? i3 * t->nb[3] : 0));
}

static void run_matmul(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct ggml_tensor * a = dst->src[0], * b = dst->src[1];
    const struct matrix ma = matrix_of(a), mb = matrix_of(b);
    const int64_t m = dst->ne[1], n = dst->ne[0], k = a->ne[0], batch = dst->ne[2] * dst->ne[3];

    /* Split whole matrices when there are enough of them, else the longer side of each output matrix. */
    int64_t first = 0, last = batch, row0 = 0, row1 = m, col0 = 0, col1 = n;
    if (batch >= nth) {
        share_of_work(batch, 1, ith, nth, &first, &last);
    } else if (m >= n) {
        share_of_work(m, 16, ith, nth, &row0, &row1);
    } else {
        share_of_work(n, 16, ith, nth, &col0, &col1);
    }
    if (row0 >= row1 || col0 >= col1) {
        return;
    }
    for (int64_t i = first; i < last; i++) {
        const int64_t i2 = i % dst->ne[2], i3 = i / dst->ne[2];
        const float * pa = batch_item(a, i2, i3), * pb = batch_item(b, i2, i3);
        float * pc = (float *) ((char *) dst->data + i2 * dst->nb[2] + i3 * dst->nb[3]);
        pa += ma.trans == CblasNoTrans ? row0 * ma.ld : row0;
        pb += mb.trans == CblasNoTrans ? col0 : col0 * mb.ld;
        scipy_cblas_sgemm(
            CblasRowMajor, ma.trans, mb.trans, (blasint) (row1 - row0), (blasint) (col1 - col0), (blasint) k, 1.0f, pa, ma.ld, pb,
            mb.ld, 0.0f, pc + row0 * n + col0, (blasint) n);
    }
}

struct ggml_tensor * pg_matmul(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b) {
    struct ggml_tensor * args[] = {a, b};
    return ggml_custom_4d(
        ctx, GGML_TYPE_F32, b->ne[0], a->ne[1], MAX(a->ne[2], b->ne[2]), MAX(a->ne[3], b->ne[3]), args, 2, run_matmul,
        GGML_N_TASKS_MAX, NULL);
}

/* ---- cross entropy of logits with integer labels ------------------------------------------------------------------------- */

static float row_max(const float * x, int64_t n) {
    float m = x[0];
    for (int64_t j = 1; j < n; j++) {
        m = x[j] > m ? x[j] : m;
    }
    return m;
}

static void run_cross_entropy(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct ggml_tensor * logits = dst->src[0];
    const int32_t * labels = dst->src[1]->data;
    const float smoothing = get_param_f32(dst, 0);
    const int64_t classes = logits->ne[0], rows = ggml_nrows(logits);
    int64_t begin, end;
    share_of_work(rows, 1, ith, nth, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        float * loss = (float *) dst->data + i;
        if (labels[i] < 0) {
            *loss = 0.0f;
            continue;
        }
        const float * x = (const float *) logits->data + i * classes;
        const float top = row_max(x, classes);
        float sum = 0.0f, total = 0.0f;
        for (int64_t j = 0; j < classes; j++) {
            sum += fast_expf(x[j] - top);
        }
        /* log(sum) and x - top are kept apart: near x = 1e8 their sum would lose the former */
        *loss = logf(sum) - (x[labels[i]] - top);
        if (smoothing > 0.0f) {
            for (int64_t j = 0; j < classes; j++) {
                total += x[j] - top;
            }
            *loss = (1.0f - smoothing) * *loss + smoothing * (logf(sum) - total / (float) classes);
        }
    }
}

struct ggml_tensor * pg_cross_entropy(
    struct ggml_context * ctx, struct ggml_tensor * logits, struct ggml_tensor * labels, float smoothing) {
    struct ggml_tensor * args[] = {logits, labels};
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, ggml_nrows(logits), 1, 1, 1, args, 2, run_cross_entropy, GGML_N_TASKS_MAX, NULL);
    set_param_f32(node, 0, smoothing);
    return node;
}

static void run_cross_entropy_back(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const float * grad = dst->src[0]->data;
    const struct ggml_tensor * logits = dst->src[1];
    const int32_t * labels = dst->src[2]->data;
    const float smoothing = get_param_f32(dst, 0);
    const int64_t classes = logits->ne[0], rows = ggml_nrows(logits);
    int64_t begin, end;
    share_of_work(rows, 1, ith, nth, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        const float * x = (const float *) logits->data + i * classes;
        float * dx = (float *) dst->data + i * classes;
        if (labels[i] < 0) {
            memset(dx, 0, classes * sizeof(float));
            continue;
        }
        const float top = row_max(x, classes);
        float sum = 0.0f;
        for (int64_t j = 0; j < classes; j++) {
            dx[j] = fast_expf(x[j] - top);
            sum += dx[j];
        }
        const float scale = 1.0f / sum, uniform = smoothing / (float) classes;
        for (int64_t j = 0; j < classes; j++) {
            dx[j] = grad[i] * (dx[j] * scale - uniform);
        }
        dx[labels[i]] -= grad[i] * (1.0f - smoothing);
    }
}

struct ggml_tensor * pg_cross_entropy_back(
    struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * logits, struct ggml_tensor * labels,
    float smoothing) {
    struct ggml_tensor * args[] = {grad, logits, labels};
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, logits->ne[0], logits->ne[1], logits->ne[2], logits->ne[3], args, 3, run_cross_entropy_back,
        GGML_N_TASKS_MAX, NULL);
    set_param_f32(node, 0, smoothing);
    return node;
}

/* ---- relu, backward ------------------------------------------------------------------------------------------------------ */

enum { CACHE_LINE = 16 }; /* in floats */

static void run_relu_back(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const float * g = dst->src[0]->data, * x = dst->src[1]->data;
    float * y = dst->data;
    int64_t begin, end;
    share_of_work(ggml_nelements(dst), CACHE_LINE, ith, nth, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        y[i] = x[i] > 0.0f ? g[i] : 0.0f;
    }
}

struct ggml_tensor * pg_relu_back(struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * x) {
    struct ggml_tensor * args[] = {grad, x};
    return ggml_custom_4d(
        ctx, GGML_TYPE_F32, x->ne[0], x->ne[1], x->ne[2], x->ne[3], args, 2, run_relu_back, GGML_N_TASKS_MAX, NULL);
}

/* ---- sum over a middle axis ---------------------------------------------------------------------------------------------- */

enum { SUM_COLUMNS = 256, SUM_BLOCK = 32 };

/* Rows are added in blocks, and the blocks' sums to the total: the rounding error grows with the number of blocks, not rows. */
static void run_sum_middle(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const int64_t inner = dst->ne[0], outer = dst->ne[1];
    const int64_t middle = ggml_nelements(dst->src[0]) / (inner * outer);
    const int64_t strips = (inner + SUM_COLUMNS - 1) / SUM_COLUMNS;
    /* few strips: give each worker narrower ones, in whole cache lines */
    const int64_t narrow = (inner / nth + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    const int64_t width = outer * strips >= nth ? SUM_COLUMNS : MIN(MAX(narrow, CACHE_LINE), SUM_COLUMNS);
    const int64_t per_row = (inner + width - 1) / width;
    int64_t begin, end;
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

struct ggml_tensor * pg_sum_middle(
    struct ggml_context * ctx, struct ggml_tensor * x, int64_t outer, int64_t middle, int64_t inner) {
    (void) middle;
    struct ggml_tensor * args[] = {x};
    return ggml_custom_4d(ctx, GGML_TYPE_F32, inner, outer, 1, 1, args, 1, run_sum_middle, GGML_N_TASKS_MAX, NULL);
}

/* ---- AdamW --------------------------------------------------------------------------------------------------------------- */

static void run_adamw(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    float * restrict w = dst->src[0]->data, * restrict m = dst->src[2]->data, * restrict v = dst->src[3]->data;
    const float * restrict g = dst->src[1]->data, * hyper = dst->src[4]->data;
    const float lr = hyper[0], beta1 = hyper[1], beta2 = hyper[2], epsilon = hyper[3];
    const float keep = 1.0f - lr * hyper[4], scale1 = hyper[5], scale2 = hyper[6];
    int64_t begin, end;
    share_of_work(ggml_nelements(dst->src[0]), CACHE_LINE, ith, nth, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        const float mi = m[i] * beta1 + g[i] * (1.0f - beta1);
        const float vi = v[i] * beta2 + g[i] * g[i] * (1.0f - beta2);
        m[i] = mi;
        v[i] = vi;
        w[i] = w[i] * keep - lr * (mi * scale1) / (sqrtf(vi * scale2) + epsilon);
    }
}

struct ggml_tensor * pg_adamw(
    struct ggml_context * ctx, struct ggml_tensor * parameter, struct ggml_tensor * grad, struct ggml_tensor * m,
    struct ggml_tensor * v, struct ggml_tensor * hyper) {
    struct ggml_tensor * args[] = {parameter, grad, m, v, hyper};
    return ggml_custom_4d(ctx, GGML_TYPE_F32, 1, 1, 1, 1, args, 5, run_adamw, GGML_N_TASKS_MAX, NULL);
}

/* ---- helpers of the Python side ------------------------------------------------------------------------------------------ */

void pg_range_i32(const int32_t * values, int64_t n, int32_t * smallest, int32_t * largest) {
    int32_t lo = values[0], hi = values[0];
    for (int64_t i = 1; i < n; i++) {
        lo = MIN(lo, values[i]);
        hi = MAX(hi, values[i]);
    }
    *smallest = lo;
    *largest  = hi;
}

void pg_refresh_views(struct ggml_cgraph * graph) {
    const int n = ggml_graph_n_nodes(graph);
    for (int i = 0; i < n; i++) {
        struct ggml_tensor * node = ggml_graph_node(graph, i);
        if (node->view_src != NULL) {
            node->data   = (char *) node->view_src->data + node->view_offs;
            node->buffer = node->view_src->buffer;
        }
    }
}

void pg_forget_addresses(struct ggml_cgraph * graph, struct ggml_tensor ** keep, int n_keep) {
    const int n = ggml_graph_n_nodes(graph);
    for (int i = 0; i < n; i++) {
        struct ggml_tensor * node = ggml_graph_node(graph, i);
        bool kept = false;
        for (int j = 0; j < n_keep && !kept; j++) {
            kept = keep[j] == node;
        }
        if (!kept) {
            node->data   = NULL;
            node->buffer = NULL;
        }
    }
}

void pg_use_single_threaded_blas(void) {
    scipy_openblas_set_num_threads(1);
}

const char * pg_blas_description(void) {
    return scipy_openblas_get_config();
}

extern int pg_on_poll(void); /* Python, in _ffi/__init__.py: runs pending signal handlers; true to stop */

bool pg_poll(void * poll_ms) {
    static _Thread_local int64_t next;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t ms = (int64_t) now.tv_sec * 1000 + now.tv_nsec / 1000000;
    if (ms < next) {
        return false;
    }
    next = ms + (int64_t) (intptr_t) poll_ms;
    return pg_on_poll() != 0;
}
