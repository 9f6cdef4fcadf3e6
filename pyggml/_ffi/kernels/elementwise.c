/* Elementwise kernels. */

#include "common.h"

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
