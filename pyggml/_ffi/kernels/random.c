/* Random bits that are a function of (key, position), so that any thread, and any replay, draws the same ones. */

#include "common.h"

/* Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011): four words from a key of two and a counter of four. */
enum { ROUNDS = 10, WORDS = 4, LANES = 64, GROUP = WORDS * LANES }; /* enough lanes to stay a loop, which vectorises */

/* Words of the LANES blocks that start at `block`; key holds the seed and the number of the draw, two words each. */
static void philox(const uint32_t key[4], uint64_t block, uint32_t out[WORDS][LANES]) {
    uint32_t k0 = key[0], k1 = key[1];
    for (int i = 0; i < LANES; i++) {
        out[0][i] = (uint32_t) (block + i);
        out[1][i] = (uint32_t) ((block + i) >> 32);
        out[2][i] = key[2];
        out[3][i] = key[3];
    }
    for (int round = 0; round < ROUNDS; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        for (int i = 0; i < LANES; i++) {
            const uint64_t p = (uint64_t) out[0][i] * 0xD2511F53u, q = (uint64_t) out[2][i] * 0xCD9E8D57u;
            out[0][i] = (uint32_t) (q >> 32) ^ out[1][i] ^ k0;
            out[2][i] = (uint32_t) (p >> 32) ^ out[3][i] ^ k1;
            out[1][i] = (uint32_t) q;
            out[3][i] = (uint32_t) p;
        }
    }
}

/* Element i takes word i % GROUP / LANES of block i / GROUP * LANES + i % LANES: a group is what the vector unit makes at once.
 * Its upper 24 bits decide. */
static void run_dropout(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const uint32_t * key = dst->src[0]->data;
    const float * x = dst->src[1] == NULL ? NULL : dst->src[1]->data;
    const float scale = get_param_f32(dst, 1);
    const uint32_t threshold = (uint32_t) get_param_i32(dst, 0);
    int64_t begin, end;
    share_of_work(ggml_nelements(dst), GROUP, ith, nth, &begin, &end);
    for (int64_t first = begin; first < end; first += GROUP) {
        uint32_t words[WORDS][LANES];
        philox(key, (uint64_t) first / WORDS, words);
        const uint32_t * word = words[0];
        const int64_t n = MIN(GROUP, end - first);
        float * y = (float *) dst->data + first;
        for (int64_t j = 0; j < n; j++) {
            const float value = x == NULL ? scale : x[first + j] * scale;
            y[j] = word[j] >> 8 >= threshold ? value : 0.0f;
        }
    }
}

struct ggml_tensor * pg_dropout(
    struct ggml_context * ctx, struct ggml_tensor * key, struct ggml_tensor * x, int32_t threshold, float scale) {
    struct ggml_tensor * args[] = {key, x};
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, x->ne[0], x->ne[1], x->ne[2], x->ne[3], args, 2, run_dropout, GGML_N_TASKS_MAX, NULL);
    set_param_i32(node, 0, threshold);
    set_param_f32(node, 1, scale);
    return node;
}

struct ggml_tensor * pg_dropout_mask(
    struct ggml_context * ctx, struct ggml_tensor * key, struct ggml_tensor * like, int32_t threshold, float scale) {
    struct ggml_tensor * args[] = {key};
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, like->ne[0], like->ne[1], like->ne[2], like->ne[3], args, 1, run_dropout, GGML_N_TASKS_MAX, NULL);
    set_param_i32(node, 0, threshold);
    set_param_f32(node, 1, scale);
    return node;
}
