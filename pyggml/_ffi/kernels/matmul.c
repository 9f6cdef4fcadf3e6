/* Matrix products by BLAS, split over ggml's workers. */

#include "common.h"
#include "cblas.h"

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

/* A worker's part of an (m, n) matrix: rows [row0, row1) and columns [col0, col1), along the longer side. */
struct part {
    int64_t row0, row1, col0, col1;
};

static struct part part_of(int64_t m, int64_t n, int ith, int nth) {
    struct part p = {0, m, 0, n};
    if (m >= n) {
        share_of_work(m, 16, ith, nth, &p.row0, &p.row1);
    } else {
        share_of_work(n, 16, ith, nth, &p.col0, &p.col1);
    }
    return p;
}

static void run_matmul(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct ggml_tensor * a = dst->src[0], * b = dst->src[1];
    const struct matrix ma = matrix_of(a), mb = matrix_of(b);
    const int64_t m = dst->ne[1], n = dst->ne[0], k = a->ne[0], batch = dst->ne[2] * dst->ne[3];

    /* Split whole matrices when there are enough of them, else the longer side of each output matrix. */
    int64_t first = 0, last = batch;
    struct part p = {0, m, 0, n};
    if (batch >= nth) {
        share_of_work(batch, 1, ith, nth, &first, &last);
    } else {
        p = part_of(m, n, ith, nth);
    }
    if (p.row0 >= p.row1 || p.col0 >= p.col1) {
        return;
    }
    for (int64_t i = first; i < last; i++) {
        const int64_t i2 = i % dst->ne[2], i3 = i / dst->ne[2];
        const float * pa = batch_item(a, i2, i3), * pb = batch_item(b, i2, i3);
        float * pc = (float *) ((char *) dst->data + i2 * dst->nb[2] + i3 * dst->nb[3]);
        pa += ma.trans == CblasNoTrans ? p.row0 * ma.ld : p.row0;
        pb += mb.trans == CblasNoTrans ? p.col0 : p.col0 * mb.ld;
        scipy_cblas_sgemm(
            CblasRowMajor, ma.trans, mb.trans, (blasint) (p.row1 - p.row0), (blasint) (p.col1 - p.col0), (blasint) k, 1.0f, pa, ma.ld,
            pb, mb.ld, 0.0f, pc + p.row0 * n + p.col0, (blasint) n);
    }
}

struct ggml_tensor * pg_matmul(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b) {
    struct ggml_tensor * args[] = {a, b};
    return ggml_custom_4d(
        ctx, GGML_TYPE_F32, b->ne[0], a->ne[1], MAX(a->ne[2], b->ne[2]), MAX(a->ne[3], b->ne[3]), args, 2, run_matmul,
        GGML_N_TASKS_MAX, NULL);
}

/* The bias is where the product's sums begin. */
static void run_linear(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct ggml_tensor * x = dst->src[0], * weight = dst->src[1], * bias = dst->src[2];
    const int64_t m = dst->ne[1], n = dst->ne[0], k = x->ne[0];
    const struct part p = part_of(m, n, ith, nth);
    if (p.row0 >= p.row1 || p.col0 >= p.col1) {
        return;
    }
    float * out = (float *) dst->data + p.row0 * n + p.col0;
    for (int64_t row = 0; bias != NULL && row < p.row1 - p.row0; row++) {
        memcpy(out + row * n, (const float *) bias->data + p.col0, (size_t) (p.col1 - p.col0) * sizeof(float));
    }
    scipy_cblas_sgemm(
        CblasRowMajor, CblasNoTrans, CblasTrans, (blasint) (p.row1 - p.row0), (blasint) (p.col1 - p.col0), (blasint) k, 1.0f,
        (const float *) x->data + p.row0 * k, (blasint) k, (const float *) weight->data + p.col0 * k, (blasint) k,
        bias != NULL ? 1.0f : 0.0f, out, (blasint) n);
}

struct ggml_tensor * pg_linear(
    struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * weight, struct ggml_tensor * bias) {
    struct ggml_tensor * args[] = {x, weight, bias};
    return ggml_custom_4d(ctx, GGML_TYPE_F32, weight->ne[1], x->ne[1], 1, 1, args, bias != NULL ? 3 : 2, run_linear, GGML_N_TASKS_MAX, NULL);
}

/* ---- with lower triangles ----
 *
 * In causal attention query i sees keys 0 to i. A block of the rows of such a matrix ends where its last row does, so that half
 * of the work is left out. */

enum { LOWER_BLOCK = 32 }; /* rows; not a function of the number of workers, nor is the result */

static enum CBLAS_TRANSPOSE flipped(enum CBLAS_TRANSPOSE trans) {
    return trans == CblasNoTrans ? CblasTrans : CblasNoTrans;
}

static const float * at_row(const float * data, struct matrix m, int64_t row) {
    return data + (m.trans == CblasNoTrans ? row * m.ld : row);
}

static const float * at_column(const float * data, struct matrix m, int64_t column) {
    return data + (m.trans == CblasNoTrans ? column : column * m.ld);
}

static void run_lower(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct ggml_tensor * a = dst->src[0], * b = dst->src[1];
    const enum pg_lower kind = get_param_i32(dst, 0);
    const struct matrix ma = matrix_of(a), mb = matrix_of(b);
    const int64_t height = dst->ne[1], width = dst->ne[0], batch = dst->ne[2] * dst->ne[3];
    const int64_t blocks = (height + LOWER_BLOCK - 1) / LOWER_BLOCK;
    int64_t begin = ith, end = batch * blocks;
    const bool whole = batch >= nth; /* else blocks, which are of unequal work, are dealt out in turn */
    if (whole) {
        share_of_work(batch, 1, ith, nth, &begin, &end);
        begin *= blocks;
        end *= blocks;
    }
    for (int64_t item = begin; item < end; item += whole ? 1 : nth) {
        const int64_t i = item / blocks, i2 = i % dst->ne[2], i3 = i / dst->ne[2];
        const int64_t row = item % blocks * LOWER_BLOCK, row_end = MIN(row + LOWER_BLOCK, height);
        const float * pa = batch_item(a, i2, i3), * pb = batch_item(b, i2, i3);
        float * pc = (float *) dst->data + (i * height + row) * width;
        const int64_t rows = row_end - row;
        if (kind == PG_LOWER_OF_PRODUCT) {
            scipy_cblas_sgemm(
                CblasRowMajor, ma.trans, flipped(mb.trans), (blasint) rows, (blasint) row_end, (blasint) a->ne[0], 1.0f,
                at_row(pa, ma, row), ma.ld, pb, mb.ld, 0.0f, pc, (blasint) width);
            for (int64_t r = row; r < row_end; r++) {
                memset(pc + (r - row) * width + r + 1, 0, (width - r - 1) * sizeof(float));
            }
            continue;
        }
        /* the whole columns on the left of the block of the diagonal, or rows below it, and this block without what is above */
        const bool transposed = kind == PG_LOWER_TRANSPOSED_TIMES;
        const int64_t first = transposed ? row_end : 0, inner = transposed ? height - row_end : row;
        const float * whole_rows = transposed ? at_column(at_row(pa, ma, first), ma, row) : at_row(pa, ma, row);
        if (inner > 0) {
            scipy_cblas_sgemm(
                CblasRowMajor, transposed ? flipped(ma.trans) : ma.trans, mb.trans, (blasint) rows, (blasint) width,
                (blasint) inner, 1.0f, whole_rows, ma.ld, at_row(pb, mb, first), mb.ld, 0.0f, pc, (blasint) width);
        }
        float corner[LOWER_BLOCK * LOWER_BLOCK] = {0.0f};
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t c = 0; c <= r; c++) {
                corner[r * LOWER_BLOCK + c] = *at_column(at_row(pa, ma, row + r), ma, row + c);
            }
        }
        scipy_cblas_sgemm(
            CblasRowMajor, transposed ? CblasTrans : CblasNoTrans, mb.trans, (blasint) rows, (blasint) width, (blasint) rows, 1.0f,
            corner, LOWER_BLOCK, at_row(pb, mb, row), mb.ld, inner > 0 ? 1.0f : 0.0f, pc, (blasint) width);
    }
}

struct ggml_tensor * pg_lower_matmul(
    struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b, enum pg_lower kind) {
    struct ggml_tensor * args[] = {a, b};
    const int64_t width = kind == PG_LOWER_OF_PRODUCT ? b->ne[1] : b->ne[0];
    const int64_t height = kind == PG_LOWER_TRANSPOSED_TIMES ? a->ne[0] : a->ne[1];
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, width, height, a->ne[2], a->ne[3], args, 2, run_lower, GGML_N_TASKS_MAX, NULL);
    set_param_i32(node, 0, kind);
    return node;
}
