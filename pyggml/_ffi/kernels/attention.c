/* Rotary position embedding. */

#include "common.h"

enum { MAX_PAIRS = 512 }; /* worked on at a time */

/* Cosine and sine of position * frequency. The angle is reduced to [-pi/4, pi/4] in double precision, since in single it would be
 * off by 1e-3 at position 10,000; then polynomials (Cephes' coefficients). */
static void rotations(double position, const double * frequency, float sign, int64_t n, float * cosine, float * sine) {
    for (int64_t k = 0; k < n; k++) {
        const double angle   = position * frequency[k];
        const double quarter = rint(angle * (2.0 / M_PI));
        const float r = (float) (angle - quarter * (M_PI / 2.0)), rr = r * r;
        const float s = r + r * rr * (-1.6666654611e-1f + rr * (8.3321608736e-3f + rr * -1.9515295891e-4f));
        const float c = 1.0f - 0.5f * rr +
                        rr * rr * (4.166664568298827e-2f + rr * (-1.388731625493765e-3f + rr * 2.443315711809948e-5f));
        /* which quarter of the circle: 0, 1, 2 or 3, in floating point, which vectorises */
        const float turn  = (float) (quarter - 4.0 * floor(quarter * 0.25));
        const bool crosses = turn == 1.0f || turn == 3.0f;
        cosine[k] = (turn == 1.0f || turn == 2.0f ? -1.0f : 1.0f) * (crosses ? s : c);
        sine[k]   = (turn >= 2.0f ? -sign : sign) * (crosses ? c : s);
    }
}

/* Rotate n pairs: element k * step with the one `apart` from it. */
static inline void rotate(
    float * restrict y, const float * restrict x, const float * cosine, const float * sine, int64_t n, int64_t step,
    int64_t apart) {
    for (int64_t k = 0; k < n; k++) {
        const float a = x[k * step], b = x[k * step + apart];
        y[k * step]         = a * cosine[k] - b * sine[k];
        y[k * step + apart] = a * sine[k] + b * cosine[k];
    }
}

/* Tokens are shared out, so the sines of one serve every head and batch item. */
static void run_rope(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const int32_t * positions = dst->src[1] == NULL ? NULL : dst->src[1]->data;
    const double base = get_param_f32(dst, 0);
    const bool interleaved = get_param_i32(dst, 1);
    const float sign = get_param_i32(dst, 2) ? -1.0f : 1.0f;
    const int64_t width = dst->ne[0], heads = dst->ne[1], tokens = dst->ne[2], batch = dst->ne[3], pairs = width / 2;
    int64_t begin, end;
    share_of_work(tokens, 1, ith, nth, &begin, &end);
    for (int64_t first = 0; first < pairs; first += MAX_PAIRS) {
        const int64_t n = MIN(MAX_PAIRS, pairs - first);
        double frequency[MAX_PAIRS];
        float cosine[MAX_PAIRS], sine[MAX_PAIRS];
        for (int64_t k = 0; k < n; k++) {
            frequency[k] = pow(base, -2.0 * (double) (first + k) / (double) width);
        }
        for (int64_t t = begin; t < end; t++) {
            rotations(positions == NULL ? (double) t : positions[t], frequency, sign, n, cosine, sine);
            for (int64_t row = 0; row < batch * heads; row++) {
                const int64_t at = ((row / heads * tokens + t) * heads + row % heads) * width + (interleaved ? 2 : 1) * first;
                const float * x = (const float *) dst->src[0]->data + at;
                float * y = (float *) dst->data + at;
                if (interleaved) {
                    rotate(y, x, cosine, sine, n, 2, 1);
                } else {
                    rotate(y, x, cosine, sine, n, 1, pairs);
                }
            }
        }
    }
}

struct ggml_tensor * pg_rope(
    struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * positions, float base, bool interleaved,
    bool inverse) {
    struct ggml_tensor * args[] = {x, positions};
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, x->ne[0], x->ne[1], x->ne[2], x->ne[3], args, positions == NULL ? 1 : 2, run_rope,
        GGML_N_TASKS_MAX, NULL);
    set_param_f32(node, 0, base);
    set_param_i32(node, 1, interleaved);
    set_param_i32(node, 2, inverse);
    return node;
}
