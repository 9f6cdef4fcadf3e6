/* Convolutions as matrix products (im2col), one tile at a time: the unfolded input never exists as a whole, and with stride 1
 * mostly not at all.
 *
 * x (images, channels, h, w) * weight (o, channels / groups, kh, kw) = y (images, o, oh, ow). In one group, the unfolded input
 * has a row for each (channel, i, j) of the kernel and a column for each output position of each image; y = weight @ unfolded.
 * A tile is some of its rows by some of its columns: part of one image, or several small ones. */

#include <stdlib.h>

#include "common.h"
#include "cblas.h"

enum {
    TILE_FLOATS = 1 << 17, /* stays in the second-level cache */
    TILE_ROWS   = 512,
    FEW_COLUMNS = 128, /* an image with fewer shares a tile with others, or the product is too narrow */
    LEAST_ROWS  = 16,  /* fewer are not worth a task of their own */
    FEW_WEIGHTS = 32,  /* sgemm's preparations take longer than the product */
    LANES       = 16,
};

struct conv {
    int64_t images, channels, h, w;
    int64_t o, kh, kw, oh, ow;
    int64_t stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups;
    /* and what follows from them */
    int64_t rows;      /* of the unfolded input, in one group */
    int64_t columns;   /* of one image */
    int64_t o_group;   /* outputs of one group */
    bool    pointwise; /* the unfolded input is the input */
};

static struct conv conv_of(
    const struct ggml_tensor * x, const struct ggml_tensor * weight, const struct ggml_tensor * y,
    const struct ggml_tensor * node) {
    struct conv v = {
        .images = x->ne[3], .channels = x->ne[2], .h = x->ne[1], .w = x->ne[0], .o = weight->ne[3], .kh = weight->ne[1],
        .kw = weight->ne[0], .oh = y->ne[1], .ow = y->ne[0], .stride_h = get_param_i32(node, 0),
        .stride_w = get_param_i32(node, 1), .pad_h = get_param_i32(node, 2), .pad_w = get_param_i32(node, 3),
        .dilation_h = get_param_i32(node, 4), .dilation_w = get_param_i32(node, 5), .groups = get_param_i32(node, 6)};
    v.rows      = v.channels / v.groups * v.kh * v.kw;
    v.columns   = v.oh * v.ow;
    v.o_group   = v.o / v.groups;
    v.pointwise = v.kh * v.kw == 1 && v.h == v.oh && v.w == v.ow && v.stride_h == 1 && v.stride_w == 1 && v.pad_h == 0 &&
                  v.pad_w == 0;
    return v;
}

static void set_conv(struct ggml_tensor * node, const int32_t * settings) {
    for (int i = 0; i < 7; i++) {
        set_param_i32(node, i, settings[i]);
    }
}

/* ---- tiles ---- */

/* Output positions [low, high) of a row whose input exists under column j of the kernel; the others see padding. */
struct range {
    int64_t low, high;
};

static struct range inside(const struct conv * v, int64_t j) {
    const int64_t ix = j * v->dilation_w - v->pad_w, stride = v->stride_w;
    const int64_t high = ix >= v->w ? 0 : MIN((v->w - 1 - ix) / stride + 1, v->ow);
    return (struct range) {ix < 0 ? MIN((-ix + stride - 1) / stride, high) : 0, high};
}

/* Unfold rows [row, row_end) and columns [first, last) of a group's input into a tile, or, to fold, add a tile to the places
 * that its elements come from. x is the group's first channel in the first image. */
static inline void walk(
    const struct conv * v, float * restrict x, int64_t row, int64_t row_end, int64_t first, int64_t last,
    float * restrict tile, bool to_tile) {
    const int64_t first_image = first / v->columns, first_y = first % v->columns / v->ow, first_x = first % v->ow;
    const int64_t stride = v->stride_w;
    for (; row < row_end; row++) {
        const int64_t i = row / v->kw % v->kh, j = row % v->kw;
        const struct range whole = inside(v, j);
        float * channel = x + (first_image * v->channels + row / (v->kh * v->kw)) * v->h * v->w + j * v->dilation_w - v->pad_w;
        int64_t ox = first_x, oy = first_y;
        for (int64_t column = first; column < last;) {
            const int64_t n = MIN(v->ow - ox, last - column), iy = oy * v->stride_h - v->pad_h + i * v->dilation_h;
            const bool exists = iy >= 0 && iy < v->h;
            const int64_t low = exists ? MIN(MAX(whole.low - ox, 0), n) : n;
            const int64_t high = exists ? MAX(MIN(whole.high - ox, n), low) : n;
            float * place = channel + iy * v->w + ox * stride;
            if (to_tile) {
                for (int64_t t = 0; t < low; t++) {
                    tile[t] = 0.0f;
                }
                if (stride == 1) {
                    memcpy(tile + low, place + low, (high - low) * sizeof(float));
                } else {
                    for (int64_t t = low; t < high; t++) {
                        tile[t] = place[t * stride];
                    }
                }
                for (int64_t t = high; t < n; t++) {
                    tile[t] = 0.0f;
                }
            } else if (stride == 1) {
                for (int64_t t = low; t < high; t++) {
                    place[t] += tile[t];
                }
            } else {
                for (int64_t t = low; t < high; t++) {
                    place[t * stride] += tile[t];
                }
            }
            tile += n;
            column += n;
            ox = 0;
            if (++oy == v->oh) {
                oy = 0;
                channel += v->channels * v->h * v->w;
            }
        }
    }
}

static void unfold(
    const struct conv * v, const float * x, int64_t row, int64_t row_end, int64_t first, int64_t last, float * tile) {
    walk(v, (float *) x, row, row_end, first, last, tile, true);
}

static void fold(
    const struct conv * v, float * x, int64_t row, int64_t row_end, int64_t first, int64_t last, float * tile) {
    walk(v, x, row, row_end, first, last, tile, false);
}

/* Copy a block of y, outputs [o, o_end) by columns [first, last), between its place and a tile of its own. */
static void copy_block(
    const struct conv * v, float * y, int64_t o, int64_t o_end, int64_t first, int64_t last, float * tile, bool to_tile) {
    for (; o < o_end; o++) {
        for (int64_t column = first; column < last;) {
            const int64_t image = column / v->columns, within = column % v->columns;
            const int64_t n = MIN(v->columns - within, last - column);
            float * place = y + (image * v->o + o) * v->columns + within;
            memcpy(to_tile ? tile : place, to_tile ? place : tile, n * sizeof(float));
            tile += n;
            column += n;
        }
    }
}

/* How many columns tiles of so many rows have: part of an image, or several whole ones if they are small. */
static int64_t tile_columns(const struct conv * v, int64_t rows) {
    const int64_t most = MAX(TILE_FLOATS / rows / CACHE_LINE * CACHE_LINE, CACHE_LINE);
    if (v->columns >= FEW_COLUMNS || most < 2 * v->columns) {
        return MIN(most, v->columns);
    }
    return MIN(most / v->columns, v->images) * v->columns;
}

/* The same, or less, so that nth workers get equally many tiles, of which there are `kinds` for the same columns. */
static int64_t shared_columns(const struct conv * v, int64_t width, int64_t kinds, int nth) {
    const int64_t workers = kinds % nth == 0 ? 1 : nth; /* that share the columns of one kind */
    if (width > v->columns) {
        const int64_t most = width / v->columns, tiles = (v->images + most - 1) / most;
        const int64_t even = MIN((tiles + workers - 1) / workers * workers, v->images);
        return (v->images + even - 1) / even * v->columns;
    }
    const int64_t share = (v->images * v->columns + workers - 1) / workers;
    return MIN(width, (share + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
}

/* Where a tile that starts at a column ends: with its image, if it began within one. */
static int64_t tile_end(const struct conv * v, int64_t first, int64_t width) {
    const int64_t limit = width > v->columns ? v->images * v->columns : (first / v->columns + 1) * v->columns;
    return MIN(first + width, limit);
}

/* The sum of the products of two vectors, in LANES sums that compilers keep in registers. */
static float dot(const float * restrict a, const float * restrict b, int64_t n) {
    float sums[LANES] = {0}, total = 0.0f;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int64_t lane = 0; lane < LANES; lane++) {
            sums[lane] += a[i + lane] * b[i + lane];
        }
    }
    for (int64_t lane = 0; lane < LANES; lane++) {
        total += sums[lane];
    }
    for (; i < n; i++) {
        total += a[i] * b[i];
    }
    return total;
}

/* c = a @ b, or c += a @ b, as in sgemm; for the few weights of one channel sgemm's preparations take longer than the work. */
static void product(
    enum CBLAS_TRANSPOSE trans_a, enum CBLAS_TRANSPOSE trans_b, int64_t m, int64_t n, int64_t k, const float * a, int64_t lda,
    const float * b, int64_t ldb, bool add, float * c, int64_t ldc) {
    if (trans_b == CblasTrans && m * n <= FEW_WEIGHTS) {
        for (int64_t i = 0; i < m; i++) {
            for (int64_t j = 0; j < n; j++) {
                c[i * ldc + j] = (add ? c[i * ldc + j] : 0.0f) + dot(a + i * lda, b + j * ldb, k);
            }
        }
    } else if (trans_b == CblasNoTrans && m * k <= FEW_WEIGHTS) {
        for (int64_t i = 0; i < m; i++) {
            float * restrict row = c + i * ldc;
            for (int64_t l = 0; l < k; l++) {
                const float weight = trans_a == CblasNoTrans ? a[i * lda + l] : a[l * lda + i];
                const float * restrict column = b + l * ldb;
                if (l == 0 && !add) {
                    for (int64_t j = 0; j < n; j++) {
                        row[j] = weight * column[j];
                    }
                } else {
                    for (int64_t j = 0; j < n; j++) {
                        row[j] += weight * column[j];
                    }
                }
            }
        }
    } else {
        scipy_cblas_sgemm(
            CblasRowMajor, trans_a, trans_b, (blasint) m, (blasint) n, (blasint) k, 1.0f, a, (blasint) lda, b, (blasint) ldb,
            add ? 1.0f : 0.0f, c, (blasint) ldc);
    }
}

/* ---- stride 1: nothing is unfolded ----
 *
 * A worker copies the lines of the input that it needs, with their padding, into a tile. There, outputs that follow one another,
 * counted along padded lines, meet under one element of the kernel inputs that follow one another. Those at the end of a padded
 * line come out of nothing that is asked for, and are left out. */

enum {
    DIRECT_FLOATS   = 1 << 14, /* of the input in a tile, which is on the stack */
    DIRECT_WEIGHTS  = 1 << 11, /* of one output that meet a tile */
    DIRECT_CHANNELS = 1 << 7,
    LEAST_CHANNELS  = 8, /* to share */
    DIRECT_PLACES   = 1 << 7, /* outputs whose gradients are laid out at a time */
};

/* The sums of a panel are as many as fit in the registers. */
#ifdef __AVX512F__
enum { LANE = 16, PANEL_ROWS = 8 };
#else
enum { LANE = 8, PANEL_ROWS = 4 };
#endif
enum { PANEL = 2 * LANE };
typedef float vector __attribute__((vector_size(LANE * sizeof(float)), aligned(sizeof(float)), may_alias));

typedef float sums_of_panel[PANEL_ROWS][PANEL];

/* y += a (rows, k) @ b (k, vectors * LANE), whose rows begin at offsets. */
static inline __attribute__((always_inline)) void add_product_of_rows(
    const int rows, const int vectors, const float * restrict a, int64_t lda, const float * restrict b,
    const int32_t * restrict offsets, int64_t k, sums_of_panel y) {
    vector sums[PANEL_ROWS][2];
    for (int r = 0; r < rows; r++) {
        for (int j = 0; j < vectors; j++) {
            sums[r][j] = *(const vector *) &y[r][j * LANE];
        }
    }
    for (int64_t l = 0; l < k; l++) {
        const vector low = *(const vector *) (b + offsets[l]), high = *(const vector *) (b + offsets[l] + (vectors - 1) * LANE);
        for (int r = 0; r < rows; r++) {
            const float weight = a[r * lda + l];
            sums[r][0] += weight * low;
            if (vectors > 1) {
                sums[r][1] += weight * high;
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        for (int j = 0; j < vectors; j++) {
            *(vector *) &y[r][j * LANE] = sums[r][j];
        }
    }
}

/* The same with numbers known to the compiler. */
static void add_product(
    int64_t rows, int64_t width, const float * a, int64_t lda, const float * b, const int32_t * offsets, int64_t k,
    sums_of_panel y) {
#define CASE(ROWS)                                              \
    case ROWS:                                                  \
        if (width > LANE) {                                     \
            add_product_of_rows(ROWS, 2, a, lda, b, offsets, k, y); \
        } else {                                                \
            add_product_of_rows(ROWS, 1, a, lda, b, offsets, k, y); \
        }                                                       \
        break
    switch (rows) {
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
#if defined __AVX512F__
        CASE(5);
        CASE(6);
        CASE(7);
        CASE(8);
#endif
    }
#undef CASE
}

/* Copy a few floats: rows of small images are shorter than a call of memcpy takes. */
static inline void copy_floats(float * restrict to, const float * restrict from, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        memcpy(to + i, from + i, 16 * sizeof(float));
    }
    if (n - i >= 8) {
        memcpy(to + i, from + i, 8 * sizeof(float));
        i += 8;
    }
    if (n - i >= 4) {
        memcpy(to + i, from + i, 4 * sizeof(float));
        i += 4;
    }
    for (; i < n; i++) {
        to[i] = from[i];
    }
}

struct direct {
    int64_t lines;    /* of outputs in a tile */
    int64_t channels; /* of one group in a tile */
    int64_t pitch;    /* of padded lines */
    int64_t area;     /* of a channel in a tile */
};

/* Tell whether a convolution can, and should, be done so, and how. */
static bool plan_direct(const struct conv * v, struct direct * d) {
    const int64_t kernel = v->kh * v->kw, halo = (v->kh - 1) * v->dilation_h, channels = v->channels / v->groups;
    d->pitch = v->ow + (v->kw - 1) * v->dilation_w;
    if (v->stride_h != 1 || v->stride_w != 1 || kernel == 1 || v->o_group < PANEL_ROWS || d->pitch > 2 * v->ow ||
        v->rows < LEAST_ROWS || d->pitch > DIRECT_FLOATS || halo > DIRECT_FLOATS) {
        return false;
    }
    const int64_t least = MIN((2 * PANEL + d->pitch - 1) / d->pitch, v->oh); /* lines */
    d->channels = MIN(MIN(DIRECT_FLOATS / ((least + halo) * d->pitch), MIN(DIRECT_WEIGHTS / kernel, DIRECT_CHANNELS)), channels);
    if (d->channels < 1) {
        return false;
    }
    d->lines = MIN(DIRECT_FLOATS / (d->channels * d->pitch) - halo, v->oh);
    d->area  = (d->lines + halo) * d->pitch;
    d->area += (3 * CACHE_LINE - d->area % (2 * CACHE_LINE)) % (2 * CACHE_LINE); /* odd in lines, not to fill a cache set */
    return true;
}

/* Copy padded lines [first, last), which count from the first output's, of so many channels. */
static void copy_lines(
    const struct conv * v, const struct direct * d, const float * x, int64_t channels, int64_t first, int64_t last,
    float * tile) {
    const int64_t low = MIN(MAX(v->pad_w, 0), d->pitch), high = MAX(MIN(v->w + v->pad_w, d->pitch), low);
    for (int64_t c = 0; c < channels; c++) {
        float * line = tile + c * d->area;
        for (int64_t at = first; at < last; at++, line += d->pitch) {
            const int64_t iy = at - v->pad_h;
            if (iy < 0 || iy >= v->h) {
                memset(line, 0, d->pitch * sizeof(float));
                continue;
            }
            memset(line, 0, low * sizeof(float));
            copy_floats(line + low, x + (c * v->h + iy) * v->w + low - v->pad_w, high - low);
            memset(line + high, 0, (d->pitch - high) * sizeof(float));
        }
    }
}

/* Move sums of `rows` outputs, n of each from place `at` in padded lines on, to y, or back. y is where the lines begin. */
static void move_sums(
    const struct conv * v, const struct direct * d, float * y, int64_t rows, int64_t at, int64_t n, sums_of_panel sums,
    bool back) {
    int64_t line = at / d->pitch, x = at % d->pitch;
    for (int64_t j = 0; j < n;) {
        const int64_t part = MIN(v->ow - x, n - j);
        for (int64_t r = 0; r < rows && part > 0; r++) {
            float * place = y + r * v->columns + line * v->ow + x;
            copy_floats(back ? sums[r] + j : place, back ? place : sums[r] + j, part);
        }
        j += d->pitch - x;
        x = 0;
        line++;
    }
}

static void run_direct(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct conv v = conv_of(dst->src[0], dst->src[1], dst, dst);
    const bool mirrored = get_param_i32(dst, 7) != 0; /* the kernel is turned round */
    const float * x = dst->src[0]->data, * weight = dst->src[1]->data;
    const float * bias = dst->src[2] != NULL ? dst->src[2]->data : NULL;
    const int64_t kernel = v.kh * v.kw, halo = (v.kh - 1) * v.dilation_h, channels = v.channels / v.groups;
    struct direct d = {0};
    (void) plan_direct(&v, &d); /* as when the node was made */
    float tile[DIRECT_FLOATS + DIRECT_CHANNELS * 2 * CACHE_LINE + 2 * PANEL] __attribute__((aligned(64)));
    int32_t offsets[DIRECT_WEIGHTS];
    for (int64_t l = 0; l < d.channels * kernel; l++) {
        const int64_t i = l / v.kw % v.kh, j = l % v.kw;
        offsets[l] = (int32_t) (l / kernel * d.area + (mirrored ? v.kh - 1 - i : i) * v.dilation_h * d.pitch +
                                (mirrored ? v.kw - 1 - j : j) * v.dilation_w);
    }
    int64_t begin, end;
    share_of_work(v.groups * v.images * v.oh, 1, ith, nth, &begin, &end);
    while (begin < end) {
        const int64_t image = begin / v.oh / v.groups, group = begin / v.oh % v.groups, oy = begin % v.oh;
        const int64_t lines = MIN(MIN(d.lines, v.oh - oy), end - begin), places = lines * d.pitch - (d.pitch - v.ow);
        const int64_t o_first = group * v.o_group, o_last = o_first + v.o_group;
        for (int64_t channel = 0; channel < channels; channel += d.channels) {
            const int64_t taken = MIN(d.channels, channels - channel);
            const float * first = x + (image * v.channels + group * channels + channel) * v.h * v.w;
            copy_lines(&v, &d, first, taken, oy, oy + lines + halo, tile);
            for (int64_t at = 0; at < places; at += PANEL) {
                const int64_t n = MIN(PANEL, places - at);
                for (int64_t o = o_first; o < o_last; o += PANEL_ROWS) {
                    const int64_t rows = MIN(PANEL_ROWS, o_last - o);
                    float * y = (float *) dst->data + (image * v.o + o) * v.columns + oy * v.ow;
                    sums_of_panel sums;
                    for (int64_t r = 0; r < rows; r++) {
                        for (int64_t j = 0; j < PANEL; j++) {
                            sums[r][j] = bias != NULL ? bias[o + r] : 0.0f;
                        }
                    }
                    if (channel > 0) {
                        move_sums(&v, &d, y, rows, at, n, sums, true);
                    }
                    const float * a = weight + o * v.rows + channel * kernel;
                    add_product(rows, n, a, v.rows, tile + at, offsets, taken * kernel, sums);
                    move_sums(&v, &d, y, rows, at, n, sums, false);
                }
            }
        }
        begin += lines;
    }
}

/* ---- y = x * weight + bias ---- */

static void fill_rows(float * y, int64_t ld, const float * values, int64_t rows, int64_t n) {
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < n; j++) {
            y[i * ld + j] = values[i];
        }
    }
}

static void run_conv2d(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct conv v = conv_of(dst->src[0], dst->src[1], dst, dst);
    const float * x = dst->src[0]->data, * weight = dst->src[1]->data;
    const float * bias = dst->src[2] != NULL ? dst->src[2]->data : NULL;
    float * y = dst->data;
    const int64_t height = MIN(v.rows, TILE_ROWS);
    const int64_t width = shared_columns(&v, tile_columns(&v, height), v.groups, nth);
    const bool several = width > v.columns;
    const int64_t per_image = (v.columns + width - 1) / width;
    const int64_t tiles = several ? (v.images * v.columns + width - 1) / width : v.images * per_image;
    float * tile = malloc((height + (several ? v.o_group : 0)) * width * sizeof(float));
    GGML_ASSERT(tile != NULL);
    float * block = tile + height * width;
    int64_t begin, end;
    share_of_work(tiles * v.groups, 1, ith, nth, &begin, &end);
    for (int64_t task = begin; task < end; task++) {
        const int64_t group = task % v.groups, t = task / v.groups;
        const int64_t first = several ? t * width : t / per_image * v.columns + t % per_image * width;
        const int64_t last = tile_end(&v, first, width), n = last - first, o = group * v.o_group;
        const float * group_x = x + group * (v.channels / v.groups) * v.h * v.w;
        const int64_t image = first / v.columns, within = first % v.columns;
        float * out = several ? block : y + (image * v.o + o) * v.columns + within;
        const int64_t ld = several ? n : v.columns;
        if (bias != NULL) {
            fill_rows(out, ld, bias + o, v.o_group, n);
        }
        for (int64_t row = 0; row < v.rows; row += height) {
            const int64_t k = MIN(height, v.rows - row);
            const float * unfolded = tile;
            int64_t ldu = n;
            if (v.pointwise && !several) {
                unfolded = group_x + (image * v.channels + row) * v.columns + within;
                ldu = v.columns;
            } else {
                unfold(&v, group_x, row, row + k, first, last, tile);
            }
            product(
                CblasNoTrans, CblasNoTrans, v.o_group, n, k, weight + o * v.rows + row, v.rows, unfolded, ldu,
                row > 0 || bias != NULL, out, ld);
        }
        if (several) {
            copy_block(&v, y, o, o + v.o_group, first, last, block, false);
        }
    }
    free(tile);
}

static struct ggml_tensor * node_of(
    struct ggml_context * ctx, ggml_custom_op_t run, struct ggml_tensor * x, struct ggml_tensor * weight,
    struct ggml_tensor * bias, int64_t oh, int64_t ow, const int32_t * settings) {
    struct ggml_tensor * args[] = {x, weight, bias};
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, ow, oh, weight->ne[3], x->ne[3], args, bias != NULL ? 3 : 2, run, GGML_N_TASKS_MAX, NULL);
    set_conv(node, settings);
    return node;
}

struct ggml_tensor * pg_conv2d(
    struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * weight, struct ggml_tensor * bias, int64_t oh,
    int64_t ow, const int32_t * settings) {
    struct ggml_tensor * node = node_of(ctx, run_conv2d, x, weight, bias, oh, ow, settings);
    const struct conv v = conv_of(x, weight, node, node);
    struct direct d;
    return plan_direct(&v, &d) ? node_of(ctx, run_direct, x, weight, bias, oh, ow, settings) : node;
}

/* ---- its gradient in x ---- */

static void run_conv2d_input(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct conv v = conv_of(dst, dst->src[1], dst->src[0], dst);
    float * g = dst->src[0]->data, * x = dst->data;
    const float * weight = dst->src[1]->data;
    /* whole channels, so that no two workers add to one place */
    const int64_t kernel = v.kh * v.kw, channels = v.channels / v.groups, plane = v.h * v.w;
    const int64_t step = MIN(MAX(TILE_ROWS / kernel, 1), channels), blocks = (channels + step - 1) / step;
    int64_t width = tile_columns(&v, step * kernel);
    width = width > v.columns ? shared_columns(&v, width, v.groups * blocks, nth) : width;
    const int64_t at_once = MAX(width / v.columns, 1); /* images */
    const bool several = at_once > 1;
    float * tile = malloc((step * kernel + (several ? v.o_group : 0)) * width * sizeof(float));
    GGML_ASSERT(tile != NULL);
    float * block = tile + step * kernel * width;
    int64_t begin, end;
    share_of_work((v.images + at_once - 1) / at_once * v.groups * blocks, 1, ith, nth, &begin, &end);
    for (int64_t task = begin; task < end; task++) {
        const int64_t group = task / blocks % v.groups, image = task / (blocks * v.groups) * at_once;
        const int64_t image_end = MIN(image + at_once, v.images);
        const int64_t channel = task % blocks * step, m = MIN(step, channels - channel), o = group * v.o_group;
        float * group_x = x + group * channels * plane;
        const bool direct = v.pointwise && !several;
        for (int64_t i = image; i < image_end && !direct; i++) {
            memset(group_x + (i * v.channels + channel) * plane, 0, m * plane * sizeof(float));
        }
        for (int64_t first = image * v.columns; first < image_end * v.columns;) {
            const int64_t last = MIN(tile_end(&v, first, width), image_end * v.columns), n = last - first;
            const float * upstream = g + (image * v.o + o) * v.columns + first % v.columns;
            if (several) {
                copy_block(&v, g, o, o + v.o_group, first, last, block, true);
                upstream = block;
            }
            product(
                CblasTrans, CblasNoTrans, m * kernel, n, v.o_group, weight + o * v.rows + channel * kernel, v.rows, upstream,
                several ? n : v.columns, false,
                direct ? group_x + (image * v.channels + channel) * plane + first % v.columns : tile, direct ? plane : n);
            if (!direct) {
                fold(&v, group_x, channel * kernel, (channel + m) * kernel, first, last, tile);
            }
            first = last;
        }
    }
    free(tile);
}

struct ggml_tensor * pg_conv2d_input(
    struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * weight, int64_t h, int64_t w,
    const int32_t * settings) {
    const int64_t kw = weight->ne[0], kh = weight->ne[1], channels = weight->ne[2], o = weight->ne[3], groups = settings[6];
    struct ggml_tensor * args[] = {grad, weight};
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, w, h, channels * groups, grad->ne[3], args, 2, run_conv2d_input, GGML_N_TASKS_MAX, NULL);
    set_conv(node, settings);
    /* With stride 1 this is a convolution too, with the kernel turned round and its two channel axes exchanged. */
    int32_t turned[7];
    memcpy(turned, settings, sizeof turned);
    turned[2] = (int32_t) (settings[4] * (kh - 1) - settings[2]);
    turned[3] = (int32_t) (settings[5] * (kw - 1) - settings[3]);
    struct conv v = conv_of(node, weight, grad, node);
    v.channels = o, v.h = grad->ne[1], v.w = grad->ne[0], v.o = channels * groups, v.oh = h, v.ow = w;
    v.rows = o / groups * kh * kw, v.o_group = channels;
    v.columns = h * w;
    struct direct d;
    if (!plan_direct(&v, &d)) {
        return node;
    }
    struct ggml_tensor * exchanged = ggml_reshape_4d(ctx, weight, kw * kh, channels, o / groups, groups);
    exchanged = pg_contiguous(ctx, ggml_permute(ctx, exchanged, 0, 2, 1, 3));
    exchanged = ggml_reshape_4d(ctx, exchanged, kw, kh, o / groups, channels * groups);
    node = node_of(ctx, run_direct, grad, exchanged, NULL, h, w, turned);
    set_param_i32(node, 7, true);
    return node;
}

/* ---- its gradient in the weight ---- */

static void run_conv2d_weight(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct conv v = conv_of(dst->src[0], dst, dst->src[1], dst);
    const float * x = dst->src[0]->data;
    float * g = dst->src[1]->data, * out = dst->data;
    /* Every worker sums over all images, for its own blocks of the weight: some rows of the unfolded input, and, if those are
     * too few to go round, some of the outputs. */
    const int64_t per_group = (nth + v.groups - 1) / v.groups;
    const int64_t rounds = (v.rows + TILE_ROWS * per_group - 1) / (TILE_ROWS * per_group) * per_group;
    const int64_t height = MIN(MAX((v.rows + rounds - 1) / rounds, LEAST_ROWS), v.rows);
    const int64_t blocks = (v.rows + height - 1) / height;
    const int64_t parts = MIN((nth + v.groups * blocks - 1) / (v.groups * blocks), v.o_group);
    const int64_t o_step = (v.o_group + parts - 1) / parts;
    const int64_t width = tile_columns(&v, height);
    const bool several = width > v.columns;
    float * tile = malloc((height + (several ? o_step : 0)) * width * sizeof(float));
    GGML_ASSERT(tile != NULL);
    float * block = tile + height * width;
    int64_t begin, end;
    share_of_work(v.groups * blocks * parts, 1, ith, nth, &begin, &end);
    for (int64_t task = begin; task < end; task++) {
        const int64_t group = task / parts / blocks, row = task / parts % blocks * height, k = MIN(height, v.rows - row);
        const int64_t o = group * v.o_group + task % parts * o_step, m = MIN(o_step, (group + 1) * v.o_group - o);
        const float * group_x = x + group * (v.channels / v.groups) * v.h * v.w;
        if (m <= 0) {
            continue;
        }
        for (int64_t first = 0; first < v.images * v.columns;) {
            const int64_t last = tile_end(&v, first, width), n = last - first;
            const int64_t image = first / v.columns, within = first % v.columns;
            const float * upstream = g + (image * v.o + o) * v.columns + within, * unfolded = tile;
            int64_t ldu = n;
            if (several) {
                copy_block(&v, g, o, o + m, first, last, block, true);
                upstream = block;
            }
            if (v.pointwise && !several) {
                unfolded = group_x + (image * v.channels + row) * v.columns + within;
                ldu = v.columns;
            } else {
                unfold(&v, group_x, row, row + k, first, last, tile);
            }
            product(
                CblasNoTrans, CblasTrans, m, k, n, upstream, several ? n : v.columns, unfolded, ldu, first > 0,
                out + o * v.rows + row, v.rows);
            first = last;
        }
    }
    free(tile);
}

/* The same with stride 1, without unfolding: (panels of outputs, rows of the unfolded input, outputs of a panel). A row meets a
 * panel of outputs position by position, for which the gradient is laid out with a panel's outputs side by side. */

/* y += the sums over n positions of an element of each of so many rows of the input times a panel of the gradient. */
static inline __attribute__((always_inline)) void add_positions_of_rows(
    const int rows, const float * restrict tile, const int32_t * offsets, const int32_t * restrict places,
    const float * restrict panel, int64_t n, float * restrict y) {
    vector sums[PANEL_ROWS][2];
    const float * row[PANEL_ROWS];
    for (int r = 0; r < rows; r++) {
        row[r] = tile + offsets[r];
        for (int j = 0; j < 2; j++) {
            sums[r][j] = *(const vector *) &y[r * PANEL + j * LANE];
        }
    }
    for (int64_t l = 0; l < n; l++) {
        const vector low = *(const vector *) (panel + l * PANEL), high = *(const vector *) (panel + l * PANEL + LANE);
        for (int r = 0; r < rows; r++) {
            const float x = row[r][places[l]];
            sums[r][0] += x * low;
            sums[r][1] += x * high;
        }
    }
    for (int r = 0; r < rows; r++) {
        for (int j = 0; j < 2; j++) {
            *(vector *) &y[r * PANEL + j * LANE] = sums[r][j];
        }
    }
}

static bool plan_direct_weight(const struct conv * v, struct direct * d) {
    return plan_direct(v, d) && v->groups == 1 && v->columns >= FEW_COLUMNS &&
           v->channels >= LEAST_CHANNELS && v->o % PANEL == 0 && v->ow <= DIRECT_PLACES;
}

static void run_direct_weight(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) unused;
    const struct ggml_tensor * x = dst->src[0], * g = dst->src[1];
    struct conv v = {
        .images = x->ne[3], .channels = x->ne[2], .h = x->ne[1], .w = x->ne[0], .o = g->ne[2], .kh = get_param_i32(dst, 7),
        .kw = get_param_i32(dst, 8), .oh = g->ne[1], .ow = g->ne[0], .stride_h = 1, .stride_w = 1,
        .pad_h = get_param_i32(dst, 2), .pad_w = get_param_i32(dst, 3), .dilation_h = get_param_i32(dst, 4),
        .dilation_w = get_param_i32(dst, 5), .groups = 1};
    v.rows = v.channels * v.kh * v.kw, v.columns = v.oh * v.ow, v.o_group = v.o;
    struct direct d = {0};
    (void) plan_direct_weight(&v, &d); /* as when the node was made */
    d.lines = MIN(d.lines, DIRECT_PLACES / v.ow);
    const int64_t kernel = v.kh * v.kw, halo = (v.kh - 1) * v.dilation_h;
    float tile[DIRECT_FLOATS + DIRECT_CHANNELS * 2 * CACHE_LINE + 2 * PANEL] __attribute__((aligned(64)));
    float panel[DIRECT_PLACES * PANEL] __attribute__((aligned(64)));
    int32_t offsets[DIRECT_WEIGHTS], places[DIRECT_PLACES];
    for (int64_t l = 0; l < d.channels * kernel; l++) {
        offsets[l] = (int32_t) (l / kernel * d.area + l / v.kw % v.kh * v.dilation_h * d.pitch + l % v.kw * v.dilation_w);
    }
    for (int64_t l = 0; l < d.lines * v.ow; l++) {
        places[l] = (int32_t) (l / v.ow * d.pitch + l % v.ow);
    }
    /* A worker sums over all images for its own channels. */
    int64_t begin, end;
    share_of_work(v.channels, 1, ith, nth, &begin, &end);
    for (int64_t p = 0; p < v.o / PANEL && begin < end; p++) {
        memset((float *) dst->data + (p * v.rows + begin * kernel) * PANEL, 0, (end - begin) * kernel * PANEL * sizeof(float));
    }
    for (int64_t channel = begin; channel < end; channel += d.channels) {
        const int64_t taken = MIN(d.channels, end - channel), rows = taken * kernel;
        for (int64_t at = 0; at < v.images * v.oh;) {
            const int64_t image = at / v.oh, oy = at % v.oh, lines = MIN(d.lines, v.oh - oy), n = lines * v.ow;
            copy_lines(
                &v, &d, (const float *) x->data + (image * v.channels + channel) * v.h * v.w, taken, oy, oy + lines + halo, tile);
            for (int64_t p = 0; p < v.o / PANEL; p++) {
                const float * from = (const float *) g->data + (image * v.o + p * PANEL) * v.columns + oy * v.ow;
                for (int64_t l = 0; l < n; l++) {
                    for (int64_t j = 0; j < PANEL; j++) {
                        panel[l * PANEL + j] = from[j * v.columns + l];
                    }
                }
                float * y = (float *) dst->data + (p * v.rows + channel * kernel) * PANEL;
                int64_t row = 0;
                for (; row + PANEL_ROWS <= rows; row += PANEL_ROWS) {
                    add_positions_of_rows(PANEL_ROWS, tile, offsets + row, places, panel, n, y + row * PANEL);
                }
                for (; row < rows; row++) {
                    add_positions_of_rows(1, tile, offsets + row, places, panel, n, y + row * PANEL);
                }
            }
            at += lines;
        }
    }
}

struct ggml_tensor * pg_conv2d_weight(
    struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * grad, int64_t kh, int64_t kw,
    const int32_t * settings) {
    struct ggml_tensor * args[] = {x, grad};
    struct ggml_tensor * node = ggml_custom_4d(
        ctx, GGML_TYPE_F32, kw, kh, x->ne[2] / settings[6], grad->ne[2], args, 2, run_conv2d_weight, GGML_N_TASKS_MAX, NULL);
    set_conv(node, settings);
    const struct conv v = conv_of(x, node, grad, node);
    struct direct d;
    if (!plan_direct_weight(&v, &d)) {
        return node;
    }
    struct ggml_tensor * panels = ggml_custom_4d(
        ctx, GGML_TYPE_F32, PANEL, v.rows, v.o / PANEL, 1, args, 2, run_direct_weight, GGML_N_TASKS_MAX, NULL);
    set_conv(panels, settings);
    set_param_i32(panels, 7, (int32_t) kh);
    set_param_i32(panels, 8, (int32_t) kw);
    return ggml_reshape_4d(ctx, pg_contiguous(ctx, ggml_transpose(ctx, panels)), kw, kh, v.channels, v.o);
}
