/* Updates of parameters in place. */

#include "common.h"

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
