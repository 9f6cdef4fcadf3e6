/* Cross entropy of logits with integer labels, and what is picked by labels. */

#include "rows.h"

/* Sums of e^(x - top) and of x - top. */
static void row_sums(const float * x, float top, int64_t n, double * exponentials, double * shifted) {
    *exponentials = *shifted = 0.0;
    for (int64_t b = 0; b < n; b += BLOCK) {
        const int64_t last = MIN(b + BLOCK, n);
        float e = 0.0f, s = 0.0f;
#pragma omp simd reduction(+ : e, s)
        for (int64_t j = b; j < last; j++) {
            const float v = x[j] - top;
            e += fast_expf(v);
            s += v;
        }
        *exponentials += e;
        *shifted += s;
    }
}

static void run_cross_entropy(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct ggml_tensor * logits = dst->src[0];
    const int32_t * labels = dst->src[1]->data;
    const float smoothing = get_param_f32(dst, 0);
    const int64_t classes = logits->ne[0];
    int64_t begin, end;
    share_of_work(ggml_nrows(logits), 1, ith, nth, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        float * loss = (float *) dst->data + i;
        if (labels[i] < 0) {
            *loss = 0.0f;
            continue;
        }
        const float * x = (const float *) logits->data + i * classes;
        const float top = row_max(x, classes);
        double sum, total;
        row_sums(x, top, classes, &sum, &total);
        /* log(sum) and x - top are kept apart: near x = 1e8 their sum would lose the former */
        const float log_sum = (float) log(sum);
        *loss = log_sum - (x[labels[i]] - top);
        if (smoothing > 0.0f) {
            *loss = (1.0f - smoothing) * *loss + smoothing * (log_sum - (float) (total / (double) classes));
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
        const float * restrict x = (const float *) logits->data + i * classes;
        float * restrict dx = (float *) dst->data + i * classes;
        if (labels[i] < 0) {
            memset(dx, 0, classes * sizeof(float));
            continue;
        }
        const float top = row_max(x, classes);
        double sum = 0.0;
        for (int64_t b = 0; b < classes; b += BLOCK) {
            const int64_t last = MIN(b + BLOCK, classes);
            float part = 0.0f;
#pragma omp simd reduction(+ : part)
            for (int64_t j = b; j < last; j++) {
                dx[j] = fast_expf(x[j] - top);
                part += dx[j];
            }
            sum += part;
        }
        const float scale = (float) (1.0 / sum), uniform = smoothing / (float) classes, g = grad[i];
        for (int64_t j = 0; j < classes; j++) {
            dx[j] = g * (dx[j] * scale - uniform);
        }
        dx[labels[i]] -= g * (1.0f - smoothing);
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

static void run_pick(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct ggml_tensor * x = dst->src[0];
    const int32_t * labels = dst->src[1]->data;
    int64_t begin, end;
    share_of_work(ggml_nelements(dst), CACHE_LINE, ith, nth, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        ((float *) dst->data)[i] = labels[i] < 0 ? 0.0f : ((const float *) x->data)[i * x->ne[0] + labels[i]];
    }
}

struct ggml_tensor * pg_pick(struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * labels) {
    struct ggml_tensor * args[] = {x, labels};
    return ggml_custom_4d(
        ctx, GGML_TYPE_F32, ggml_nrows(x), 1, 1, 1, args, 2, run_pick, GGML_N_TASKS_MAX, NULL);
}
