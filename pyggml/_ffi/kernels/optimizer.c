/* Updates of parameters in place: one pass over a parameter w, its gradient g and the method's state.
 *
 * pyggml/ops/update.py has each formula in NumPy, and the names of the numbers in n. */

#include "common.h"

enum { MAX_STATES = 3 };

/* What one worker updates. */
struct share {
    float * w;
    const float * g;
    float * state[MAX_STATES]; /* NULL behind the last */
    const float * n;
    int64_t count;
    bool flag;
};

static struct share share_of_update(const struct ggml_tensor * dst, int ith, int nth) {
    int table = 2; /* the last input */
    while (table + 1 < GGML_MAX_SRC && dst->src[table + 1] != NULL) {
        table++;
    }
    int64_t begin, end;
    share_of_work(ggml_nelements(dst), CACHE_LINE, ith, nth, &begin, &end);
    struct share s = {
        .w     = (float *) dst->src[0]->data + begin,
        .g     = (const float *) dst->src[1]->data + begin,
        .n     = (const float *) dst->src[table]->data + get_param_i32(dst, 0) * dst->src[table]->ne[0],
        .count = end - begin,
        .flag  = get_param_i32(dst, 1),
    };
    for (int i = 2; i < table; i++) {
        s.state[i - 2] = (float *) dst->src[i]->data + begin;
    }
    return s;
}

static void run_sgd(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct share s = share_of_update(dst, ith, nth);
    float * restrict w = s.w, * restrict v = s.state[0];
    const float * restrict g = s.g;
    const float lr = s.n[0], decay = s.n[1], momentum = s.n[2], from_g = s.flag ? 1.0f : 0.0f;
    const float from_v = s.flag ? momentum : 1.0f;
    if (v == NULL) {
        for (int64_t i = 0; i < s.count; i++) {
            w[i] -= lr * (g[i] + decay * w[i]);
        }
        return;
    }
    for (int64_t i = 0; i < s.count; i++) {
        const float gi = g[i] + decay * w[i], vi = momentum * v[i] + gi;
        v[i] = vi;
        w[i] -= lr * (from_g * gi + from_v * vi);
    }
}

static void run_adamw(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct share s = share_of_update(dst, ith, nth);
    float * restrict w = s.w, * restrict m = s.state[0], * restrict v = s.state[1];
    const float * restrict g = s.g;
    const float lr = s.n[0], beta1 = s.n[1], beta2 = s.n[2], eps = s.n[3], keep = 1.0f - lr * s.n[4];
    const float scale1 = s.n[5], scale2 = s.n[6], coupled = s.n[7];
    for (int64_t i = 0; i < s.count; i++) {
        const float gi = g[i] + coupled * w[i];
        const float mi = m[i] * beta1 + gi * (1.0f - beta1);
        const float vi = v[i] * beta2 + gi * gi * (1.0f - beta2);
        m[i] = mi;
        v[i] = vi;
        w[i] = w[i] * keep - lr * (mi * scale1) / (sqrtf(vi * scale2) + eps);
    }
}

static void run_lion(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct share s = share_of_update(dst, ith, nth);
    float * restrict w = s.w, * restrict m = s.state[0];
    const float * restrict g = s.g;
    const float lr = s.n[0], keep = 1.0f - lr * s.n[1], share1 = s.n[2], share2 = s.n[3];
    for (int64_t i = 0; i < s.count; i++) {
        const float apart = g[i] - m[i], c = m[i] + share1 * apart;
        m[i] += share2 * apart;
        w[i] = w[i] * keep - lr * (c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : c); /* keeps NaN */
    }
}

static void run_rmsprop(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct share s = share_of_update(dst, ith, nth);
    const bool centered = s.flag;
    float * restrict w = s.w, * restrict v = s.state[0], * restrict mean = centered ? s.state[1] : NULL;
    float * restrict velocity = s.state[centered ? 2 : 1];
    const float * restrict g = s.g;
    const float lr = s.n[0], decay = s.n[1], share = s.n[2], eps = s.n[3], momentum = s.n[4];
    for (int64_t i = 0; i < s.count; i++) {
        const float gi = g[i] + decay * w[i];
        float spread = v[i] += share * (gi * gi - v[i]);
        if (mean != NULL) {
            mean[i] += share * (gi - mean[i]);
            spread = MAX(spread - mean[i] * mean[i], 0.0f);
        }
        float step = gi / (sqrtf(spread) + eps);
        if (velocity != NULL) {
            step = velocity[i] = momentum * velocity[i] + step;
        }
        w[i] -= lr * step;
    }
}

static void run_adagrad(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct share s = share_of_update(dst, ith, nth);
    float * restrict w = s.w, * restrict total = s.state[0];
    const float * restrict g = s.g;
    const float lr = s.n[0], decay = s.n[1], eps = s.n[2];
    for (int64_t i = 0; i < s.count; i++) {
        const float gi = g[i] + decay * w[i];
        total[i] += gi * gi;
        w[i] -= lr * gi / (sqrtf(total[i]) + eps);
    }
}

static void run_average(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct share s = share_of_update(dst, ith, nth);
    float * restrict w = s.w;
    const float * restrict g = s.g;
    const float share = s.n[0];
    for (int64_t i = 0; i < s.count; i++) {
        w[i] += share * (g[i] - w[i]);
    }
}

struct ggml_tensor * pg_update(
    struct ggml_context * ctx, enum pg_method method, struct ggml_tensor ** args, int n_args, int row, bool flag) {
    static const ggml_custom_op_t run[] = {
        [PG_SGD] = run_sgd,         [PG_ADAMW] = run_adamw,     [PG_LION] = run_lion,
        [PG_RMSPROP] = run_rmsprop, [PG_ADAGRAD] = run_adagrad, [PG_AVERAGE] = run_average,
    };
    struct ggml_tensor * node =
        ggml_custom_inplace(ctx, args[0], args + 1, n_args - 1, run[method], GGML_N_TASKS_MAX, NULL);
    set_param_i32(node, 0, row);
    set_param_i32(node, 1, flag);
    return node;
}

/* w is seen as rows; a batch of them shares the columns. */
static void run_factored_step(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct ggml_tensor * rows = dst->src[2], * columns = dst->src[3];
    const float size = *(const float *) dst->src[4]->data, keep = *(const float *) dst->src[5]->data;
    const float least = *(const float *) dst->src[6]->data;
    const int64_t count = ggml_nelements(rows), width = ggml_nelements(dst) / count;
    const int64_t rows_in_batch = count / (ggml_nelements(columns) / width);
    int64_t begin, end;
    share_of_work(count, width < CACHE_LINE ? CACHE_LINE : 1, ith, nth, &begin, &end);
    for (int64_t r = begin; r < end; r++) {
        const float row = ((const float *) rows->data)[r];
        const float * restrict column = (const float *) columns->data + r / rows_in_batch * width;
        const float * restrict g = (const float *) dst->src[1]->data + r * width;
        float * restrict w = (float *) dst->data + r * width;
        for (int64_t i = 0; i < width; i++) {
            w[i] = keep * w[i] - size * g[i] / sqrtf(MAX(row * column[i], least));
        }
    }
}

struct ggml_tensor * pg_factored_step(struct ggml_context * ctx, struct ggml_tensor ** args) {
    return ggml_custom_inplace(ctx, args[0], args + 1, 6, run_factored_step, GGML_N_TASKS_MAX, NULL);
}
