/* Recurrent layers: all steps of a sequence in one node.
 *
 * Items of a batch do not meet, so a worker takes its share of them through all steps, and none waits for another. A step is a
 * product with the recurrent weight and then elementwise work. The product is done here, a tile at a time, so that what follows
 * finds its elements in the nearest cache; the weight is laid out for that once (pg_panels). An element's sum always runs in the
 * same order, so its bits depend neither on the number of threads nor on the rest of the batch. */

#include "common.h"
#include "cblas.h"

/* A tile is as large as its sums fit in the registers. */
#ifdef __AVX512F__
enum { TILE_ROWS = 8, PANEL = 32 };
#define ROW_LOOP
#else
enum { TILE_ROWS = 4, PANEL = 16 };
#define ROW_LOOP _Pragma("omp simd") /* else compilers unroll a loop so short, and then find no vectors in it */
#endif

enum { MOST_GATES = 4 };

/* ---- products ---- */

typedef float tile[TILE_ROWS][PANEL];

/* y[g] = a (rows, k) @ panel g (k, PANEL), or y[g] += that; panels of gates are `gate` apart. */
static inline __attribute__((always_inline)) void product_of_rows(
    const int gates, const int rows, const float * restrict a, int64_t a_stride, const float * restrict panel, int64_t gate,
    int64_t k, tile * y, bool add) {
    tile sums; /* of each gate in turn: gates * rows are at most TILE_ROWS */
    for (int g = 0; g < gates; g++) {
        for (int r = 0; r < rows; r++) {
ROW_LOOP
            for (int j = 0; j < PANEL; j++) {
                sums[g * rows + r][j] = add ? y[g][r][j] : 0.0f;
            }
        }
    }
    for (int64_t i = 0; i < k; i++) {
        for (int g = 0; g < gates; g++) {
            for (int r = 0; r < rows; r++) {
                const float x = a[r * a_stride + i];
ROW_LOOP
                for (int j = 0; j < PANEL; j++) {
                    sums[g * rows + r][j] += x * panel[g * gate + i * PANEL + j];
                }
            }
        }
    }
    for (int g = 0; g < gates; g++) {
        for (int r = 0; r < rows; r++) {
ROW_LOOP
            for (int j = 0; j < PANEL; j++) {
                y[g][r][j] = sums[g * rows + r][j];
            }
        }
    }
}

/* The same with sizes known to the compiler. The sums of few rows and one gate would wait for each other: as many gates as fit
 * are taken together. */
static void product(
    int gates, int64_t rows, const float * a, int64_t a_stride, const float * panel, int64_t gate, int64_t k, tile * y,
    bool add) {
    const int most = (int) MIN(TILE_ROWS / rows, MOST_GATES);
    for (int together; gates > 0; gates -= together, panel += together * gate, y += together) {
        together = MIN(gates, most);
        switch (10 * together + rows) {
#define CASE(g, r) case 10 * g + r: product_of_rows(g, r, a, a_stride, panel, gate, k, y, add); break;
            CASE(1, 1) CASE(1, 2) CASE(1, 3) CASE(1, 4) CASE(2, 1) CASE(2, 2) CASE(3, 1) CASE(4, 1)
#ifdef __AVX512F__
            CASE(1, 5) CASE(1, 6) CASE(1, 7) CASE(1, 8) CASE(2, 3) CASE(2, 4) CASE(3, 2) CASE(4, 2)
#endif
#undef CASE
        }
    }
}

static void run_panels(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct ggml_tensor * x = dst->src[0];
    const int64_t k = dst->ne[1], panels = dst->ne[2], groups = dst->ne[3], columns = x->ne[1] / groups;
    int64_t begin, end;
    share_of_work(panels * groups, 1, ith, nth, &begin, &end);
    const int64_t column_stride = (int64_t) (x->nb[1] / sizeof(float)), k_stride = (int64_t) (x->nb[0] / sizeof(float));
    for (int64_t at = begin; at < end; at++) {
        const int64_t first = at % panels * PANEL, n = MIN(PANEL, columns - first);
        const float * from = (const float *) x->data + (at / panels * columns + first) * column_stride;
        float * to = (float *) dst->data + at * k * PANEL;
        if (n < PANEL) {
            memset(to, 0, k * PANEL * sizeof(float));
        }
        if (column_stride == 1) {
            for (int64_t i = 0; i < k; i++) {
                memcpy(to + i * PANEL, from + i * k_stride, n * sizeof(float));
            }
        } else if (k_stride == 1) {
            scipy_cblas_somatcopy(
                CblasRowMajor, CblasTrans, (blasint) n, (blasint) k, 1.0f, from, (blasint) column_stride, to, PANEL);
        } else {
            for (int64_t j = 0; j < n; j++) {
                for (int64_t i = 0; i < k; i++) {
                    to[i * PANEL + j] = from[i * k_stride + j * column_stride];
                }
            }
        }
    }
}

struct ggml_tensor * pg_panels(struct ggml_context * ctx, struct ggml_tensor * x, int64_t groups) {
    const int64_t panels = (x->ne[1] / groups + PANEL - 1) / PANEL;
    return ggml_custom_4d(ctx, GGML_TYPE_F32, PANEL, x->ne[0], panels, groups, &x, 1, run_panels, GGML_N_TASKS_MAX, NULL);
}

/* ---- what is kept of a sequence ---- */

/* Rows of (batch, hidden) in one tensor: the states before the first step and after each, then the gates of each step, as (steps,
 * batch, 4 * hidden). States stand in the order h[0], h[1], ..., h[steps], c[steps], ..., c[0], or without the c; a layer that
 * reads from the end has them in the opposite order, so that its h, too, follow the order of time. */
struct sequence {
    int64_t steps, batch, hidden, states;
    bool    reverse;
    float * rows;
};

static struct sequence sequence_of(struct ggml_tensor * kept, int states, bool reverse) {
    return (struct sequence) {
        .steps = (kept->ne[2] - states) / (states + MOST_GATES), .batch = kept->ne[1], .hidden = kept->ne[0], .states = states,
        .reverse = reverse, .rows = kept->data};
}

static float * state_row(const struct sequence * s, int64_t row) {
    const int64_t last = s->states * (s->steps + 1) - 1;
    return s->rows + (s->reverse ? last - row : row) * s->batch * s->hidden;
}

/* h and c after so many steps. */
static float * h_after(const struct sequence * s, int64_t steps) {
    return state_row(s, steps);
}

static float * c_after(const struct sequence * s, int64_t steps) {
    return state_row(s, 2 * s->steps + 1 - steps);
}

/* The place in time of the step that is taken as number `step`. */
static int64_t time_of(const struct sequence * s, int64_t step) {
    return s->reverse ? s->steps - 1 - step : step;
}

static float * gates_at(const struct sequence * s, int64_t time) {
    return s->rows + (s->states * (s->steps + 1) + MOST_GATES * time) * s->batch * s->hidden;
}

/* ---- forward ---- */

/* n units of one item: from the sums of products, which lack the bias, the gates; from those and the state before the state
 * after. Gates and biases of a unit are `hidden` apart. */
typedef void (*cell)(
    int64_t n, const tile * sums, int64_t row, const float * bias, int64_t hidden, float * gates, const float * h, float * h_next,
    const float * c, float * c_next);

/* What comes from x, of some rows and one panel of each gate: tiles for the last gates, of which q is none. */
static inline __attribute__((always_inline)) void sums_from_x(
    const int states, const struct ggml_tensor * panels, int64_t p, int64_t rows, const float * x, int64_t x_stride,
    tile * sums) {
    const int64_t inputs = panels->ne[1], size = inputs * PANEL;
    const float * panel = (const float *) panels->data + p * size;
    const int skipped = 2 - states;
    product(MOST_GATES - skipped, rows, x, x_stride, panel, panels->ne[2] * size, inputs, sums + skipped, false);
}

/* What comes from h is added; for q it is all there is. */
static inline __attribute__((always_inline)) void sums_from_h(
    const int states, const struct ggml_tensor * panels, int64_t p, int64_t rows, const float * h, tile * sums) {
    const int64_t hidden = panels->ne[1], size = hidden * PANEL, gate = panels->ne[2] * size;
    const float * panel = (const float *) panels->data + p * size;
    if (states == 2) {
        product(4, rows, h, hidden, panel, gate, hidden, sums, true);
    } else {
        product(2, rows, h, hidden, panel, gate, hidden, sums + 1, true);
        product(1, rows, h, hidden, panel + 2 * gate, gate, hidden, sums, false);
    }
}

/* The sums from x of one item for all steps, put where its gates will be. */
static inline __attribute__((always_inline)) void all_sums_from_x(
    const int states, const struct sequence * s, const struct ggml_tensor * panels, const float * x, int64_t item) {
    const int64_t inputs = panels->ne[1];
    for (int64_t p = 0; p < panels->ne[2]; p++) {
        const int64_t unit = p * PANEL, n = MIN(PANEL, s->hidden - unit);
        for (int64_t time = 0; time < s->steps; time += TILE_ROWS) {
            const int64_t rows = MIN(TILE_ROWS, s->steps - time);
            tile sums[MOST_GATES];
            sums_from_x(states, panels, p, rows, x + (time * s->batch + item) * inputs, s->batch * inputs, sums);
            for (int g = 2 - states; g < MOST_GATES; g++) {
                for (int64_t r = 0; r < rows; r++) {
                    float * to = gates_at(s, time + r) + (item * MOST_GATES + g) * s->hidden + unit;
                    memcpy(to, sums[g][r], n * sizeof(float));
                }
            }
        }
    }
}

static inline __attribute__((always_inline)) void run_forward(
    struct ggml_tensor * dst, int ith, int nth, const int states, cell f) {
    const struct ggml_tensor * h_panels = dst->src[0], * x_panels = dst->src[1], * x = dst->src[2], * bias = dst->src[3];
    const struct sequence s = sequence_of(dst, states, get_param_i32(dst, 0));
    const int64_t hidden = s.hidden, inputs = x->ne[0];
    int64_t begin, end;
    share_of_work(s.batch, 1, ith, nth, &begin, &end);
    for (int state = 0; begin < end && state < states; state++) {
        float * first = state == 0 ? h_after(&s, 0) : c_after(&s, 0);
        memcpy(first + begin * hidden, (const float *) dst->src[4 + state]->data + begin * hidden,
               (end - begin) * hidden * sizeof(float));
    }
    /* A few rows would read all of the weight in each step: instead the steps of an item share that. */
    const bool ahead = 4 * (end - begin) <= TILE_ROWS;
    for (int64_t item = begin; ahead && item < end; item++) {
        all_sums_from_x(states, &s, x_panels, x->data, item);
    }
    for (int64_t step = 0; step < s.steps; step++) {
        const int64_t time = time_of(&s, step);
        const float * h = h_after(&s, step), * c = states == 2 ? c_after(&s, step) : NULL;
        float * h_next = h_after(&s, step + 1), * c_next = states == 2 ? c_after(&s, step + 1) : NULL;
        for (int64_t p = 0; p < h_panels->ne[2]; p++) {
            const int64_t unit = p * PANEL, n = MIN(PANEL, hidden - unit);
            for (int64_t row = begin; row < end; row += TILE_ROWS) {
                const int64_t rows = MIN(TILE_ROWS, end - row);
                tile sums[MOST_GATES];
                if (ahead) {
                    for (int g = 2 - states; g < MOST_GATES; g++) {
                        for (int64_t r = 0; r < rows; r++) {
                            const float * from = gates_at(&s, time) + ((row + r) * MOST_GATES + g) * hidden + unit;
                            memcpy(sums[g][r], from, n * sizeof(float));
                            memset(sums[g][r] + n, 0, (PANEL - n) * sizeof(float));
                        }
                    }
                } else {
                    const float * x_rows = (const float *) x->data + (time * s.batch + row) * inputs;
                    sums_from_x(states, x_panels, p, rows, x_rows, inputs, sums);
                }
                sums_from_h(states, h_panels, p, rows, h + row * hidden, sums);
                for (int64_t r = 0; r < rows; r++) {
                    const int64_t item = row + r, at = item * hidden + unit;
                    f(n, sums, r, (const float *) bias->data + unit, hidden,
                      gates_at(&s, time) + item * MOST_GATES * hidden + unit, h + at, h_next + at,
                      states == 2 ? c + at : NULL, states == 2 ? c_next + at : NULL);
                }
            }
        }
    }
}

/* The sigmoid function, quicker than sigmoid_of for letting all below -87 be e^-87, next to which no gate tells a difference. */
static inline float gate_of(float x) {
    return 1.0f / (1.0f + normal_expf(bounded(-x, -87.0f, 87.0f), 0.0f));
}

static inline void lstm_cell(
    int64_t n, const tile * sums, int64_t row, const float * bias, int64_t hidden, float * gates, const float * h, float * h_next,
    const float * c, float * c_next) {
    (void) h;
    const float * si = sums[0][row], * sf = sums[1][row], * sg = sums[2][row], * so = sums[3][row];
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        const float i = gate_of(si[j] + bias[j]), f = gate_of(sf[j] + bias[hidden + j]);
        const float g = tanh_of(sg[j] + bias[2 * hidden + j]), o = gate_of(so[j] + bias[3 * hidden + j]);
        c_next[j] = f * c[j] + i * g;
        h_next[j] = o * tanh_of(c_next[j]);
        gates[j]              = i;
        gates[hidden + j]     = f;
        gates[2 * hidden + j] = g;
        gates[3 * hidden + j] = o;
    }
}

static inline void gru_cell(
    int64_t n, const tile * sums, int64_t row, const float * bias, int64_t hidden, float * gates, const float * h, float * h_next,
    const float * c, float * c_next) {
    (void) c, (void) c_next;
    const float * sq = sums[0][row], * sr = sums[1][row], * sz = sums[2][row], * sn = sums[3][row];
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        const float q = sq[j] + bias[j];
        const float r = gate_of(sr[j] + bias[hidden + j]), z = gate_of(sz[j] + bias[2 * hidden + j]);
        const float m = tanh_of(sn[j] + bias[3 * hidden + j] + r * q); /* n in the formula */
        h_next[j] = m + z * (h[j] - m);
        gates[j]              = q;
        gates[hidden + j]     = r;
        gates[2 * hidden + j] = z;
        gates[3 * hidden + j] = m;
    }
}

static void run_lstm(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    run_forward(dst, ith, nth, 2, lstm_cell);
}

static void run_gru(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    run_forward(dst, ith, nth, 1, gru_cell);
}

struct ggml_tensor * pg_recurrent(
    struct ggml_context * ctx, struct ggml_tensor * h_panels, struct ggml_tensor * x_panels, struct ggml_tensor * x,
    struct ggml_tensor * bias, struct ggml_tensor * h, struct ggml_tensor * c, bool reverse) {
    struct ggml_tensor * args[] = {h_panels, x_panels, x, bias, h, c};
    const int states = c == NULL ? 1 : 2;
    const int64_t hidden = h->ne[0], batch = h->ne[1], steps = x->ne[1] / batch;
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, hidden, batch, states * (steps + 1) + MOST_GATES * steps, 1, args, 4 + states,
        states == 2 ? run_lstm : run_gru, GGML_N_TASKS_MAX, NULL);
    set_param_i32(node, 0, reverse);
    return node;
}

/* ---- backward ---- */

/* n units of one item: from the gradient in h, the gradients in the gates before their activation; dh and dc go in with what
 * reaches these states from later steps past the product, and come out with that for the states before. */
typedef void (*cell_back)(
    int64_t n, const float * from_product, const float * grad, int64_t hidden, const float * gates, const float * h,
    const float * c, const float * c_next, float * d_gates, float * dh, float * dc);

static inline __attribute__((always_inline)) void run_backward(
    struct ggml_tensor * dst, int ith, int nth, const int states, cell_back f) {
    const struct ggml_tensor * panels = dst->src[0];
    const struct sequence s = sequence_of(dst->src[2], states, get_param_i32(dst, 0));
    const int64_t hidden = s.hidden, whole = s.batch * hidden, width = MOST_GATES * hidden, n_panels = panels->ne[2];
    /* of each state after a step, in the order of time, and of c after the last one, on the far side of h */
    const float * grad = dst->src[1]->data, * grad_h = grad + (states == 2 && s.reverse ? whole : 0);
    float * d_gates = dst->data, * dh = d_gates + s.steps * s.batch * width, * dc = dh + whole;
    int64_t begin, end;
    share_of_work(s.batch, 1, ith, nth, &begin, &end);
    for (int64_t k = begin * hidden; k < end * hidden; k++) {
        dh[k] = 0.0f;
        if (states == 2) {
            dc[k] = grad[(s.reverse ? 0 : s.steps * whole) + k];
        }
    }
    for (int64_t step = s.steps - 1; step >= -1; step--) {
        const int64_t time = time_of(&s, step);
        const float * after = d_gates + time_of(&s, step + 1) * s.batch * width; /* the step taken after this one */
        for (int64_t p = 0; p < n_panels; p++) {
            const float * panel = (const float *) panels->data + p * panels->ne[1] * PANEL;
            const int64_t unit = p * PANEL, n = MIN(PANEL, hidden - unit);
            for (int64_t row = begin; row < end; row += TILE_ROWS) {
                const int64_t rows = MIN(TILE_ROWS, end - row);
                tile products = {{0}};
                if (step < s.steps - 1 && states == 2) {
                    product(1, rows, after + row * width, width, panel, 0, 4 * hidden, &products, false);
                } else if (step < s.steps - 1) { /* the weight has the rows for q last */
                    product(1, rows, after + row * width, width, panel + 2 * hidden * PANEL, 0, hidden, &products, false);
                    product(1, rows, after + row * width + hidden, width, panel, 0, 2 * hidden, &products, true);
                }
                for (int64_t r = 0; r < rows; r++) {
                    const int64_t item = row + r, at = item * hidden + unit;
                    if (step < 0) {
                        for (int64_t j = 0; j < n; j++) {
                            dh[at + j] += products[r][j];
                        }
                        continue;
                    }
                    const int64_t gates_of_item = (time * s.batch + item) * width + unit;
                    f(n, products[r], grad_h + time * whole + at, hidden, gates_at(&s, 0) + gates_of_item, h_after(&s, step) + at,
                      states == 2 ? c_after(&s, step) + at : NULL, states == 2 ? c_after(&s, step + 1) + at : NULL,
                      d_gates + gates_of_item, dh + at, dc + at);
                }
            }
        }
    }
}

static inline void lstm_cell_back(
    int64_t n, const float * from_product, const float * grad, int64_t hidden, const float * gates, const float * h,
    const float * c, const float * c_next, float * d_gates, float * dh, float * dc) {
    (void) h, (void) dh;
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        const float i = gates[j], f = gates[hidden + j], g = gates[2 * hidden + j], o = gates[3 * hidden + j];
        const float d = from_product[j] + grad[j], t = tanh_of(c_next[j]);
        const float e = dc[j] + d * o * (1.0f - t) * (1.0f + t);
        dc[j] = e * f;
        d_gates[j]              = e * g * i * (1.0f - i);
        d_gates[hidden + j]     = e * c[j] * f * (1.0f - f);
        d_gates[2 * hidden + j] = e * i * (1.0f - g) * (1.0f + g);
        d_gates[3 * hidden + j] = d * t * o * (1.0f - o);
    }
}

static inline void gru_cell_back(
    int64_t n, const float * from_product, const float * grad, int64_t hidden, const float * gates, const float * h,
    const float * c, const float * c_next, float * d_gates, float * dh, float * dc) {
    (void) c, (void) c_next, (void) dc;
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        const float q = gates[j], r = gates[hidden + j], z = gates[2 * hidden + j], m = gates[3 * hidden + j];
        const float d = from_product[j] + dh[j] + grad[j];
        const float e = d * (1.0f - z) * (1.0f - m) * (1.0f + m);
        dh[j] = d * z;
        d_gates[j]              = e * r;
        d_gates[hidden + j]     = e * q * r * (1.0f - r);
        d_gates[2 * hidden + j] = d * (h[j] - m) * z * (1.0f - z);
        d_gates[3 * hidden + j] = e;
    }
}

static void run_lstm_back(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    run_backward(dst, ith, nth, 2, lstm_cell_back);
}

static void run_gru_back(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    run_backward(dst, ith, nth, 1, gru_cell_back);
}

struct ggml_tensor * pg_recurrent_back(
    struct ggml_context * ctx, struct ggml_tensor * panels, struct ggml_tensor * grad, struct ggml_tensor * kept, int states,
    bool reverse) {
    struct ggml_tensor * args[] = {panels, grad, kept};
    const int64_t steps = grad->ne[2] - (states - 1);
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, kept->ne[0], kept->ne[1], MOST_GATES * steps + states, 1, args, 3,
        states == 2 ? run_lstm_back : run_gru_back, GGML_N_TASKS_MAX, NULL);
    set_param_i32(node, 0, reverse);
    return node;
}
