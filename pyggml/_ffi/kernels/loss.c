/* Cross entropy of logits with integer labels. */

#include "common.h"

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
