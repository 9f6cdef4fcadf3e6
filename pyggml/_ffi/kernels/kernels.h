/* What pyggml adds to ggml: kernels for which ggml has no op, or loses by a measured factor (benchmarks/).
 *
 * build_ggml.py feeds this file to cffi as it stands, so it holds declarations only.
 *
 * Every constructor returns a ggml_custom_4d node: its work is split over ggml's own workers, and it can stand in any graph
 * that runs on the CPU backend. Shapes are given in NumPy's order, last axis contiguous in memory. */

/* (..., m, k) @ (..., k, n): single-threaded sgemm calls on slices of the output. Either of an operand's last two axes may be
 * the contiguous one, so transposes are free; batch axes of size 1 broadcast. */
struct ggml_tensor * pg_matmul(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b);
/* x (m, k) @ weight (n, k) transposed, plus a bias (n,) or NULL, all contiguous: (m, n). */
struct ggml_tensor * pg_linear(
    struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * weight, struct ggml_tensor * bias);

/* Products of equally many matrices with the lower triangles of square ones: that of a @ b.T; that of a, or its transpose, @ b. */
enum pg_lower { PG_LOWER_OF_PRODUCT, PG_LOWER_TIMES, PG_LOWER_TRANSPOSED_TIMES };
struct ggml_tensor * pg_lower_matmul(
    struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b, enum pg_lower kind);

/* Negative log-likelihood of each row of logits (rows, classes) under its int32 label: (rows,). A negative label gives 0. */
struct ggml_tensor * pg_cross_entropy(
    struct ggml_context * ctx, struct ggml_tensor * logits, struct ggml_tensor * labels, float smoothing);
/* Its gradient in the logits, given the gradient of each row's loss. */
struct ggml_tensor * pg_cross_entropy_back(
    struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * logits, struct ggml_tensor * labels,
    float smoothing);

/* The element of each row that its int32 label names, 0 for a negative label: (rows,). */
struct ggml_tensor * pg_pick(struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * labels);

/* Softmax of scale * x + mask along rows: e^(. - max) over its sum. mask, or NULL, has rows as long as x's and broadcasts over the
 * other axes; a row that it masks throughout gives zeros. causal: query i of m sees the first n - m + i + 1 of n keys only. */
struct ggml_tensor * pg_softmax(
    struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * mask, float scale, bool causal);
/* Its gradient in x: scale * y * (grad - sum(grad * y)). */
struct ggml_tensor * pg_softmax_back(
    struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * y, float scale, bool causal);
/* x - max - log(sum(e^(x - max))) along rows. */
struct ggml_tensor * pg_log_softmax(struct ggml_context * ctx, struct ggml_tensor * x);

/* x seen as (outer, channels, inner), each channel brought to mean 0 (only if centered) and mean square 1: divided by
 * sqrt(variance + eps); then * weight + bias, if not NULL. An element of these holds for a run of places in inner; where there
 * are fewer than all channels need, they start anew. Without statistics, channels are rows: outer is 1, and a
 * weight has an element for each place. */
struct ggml_tensor * pg_norm(
    struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * statistics, struct ggml_tensor * weight,
    struct ggml_tensor * bias, int64_t outer, int64_t inner, int64_t run, float eps, bool centered);
/* Its gradient in x. */
struct ggml_tensor * pg_norm_back(
    struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * x, struct ggml_tensor * statistics,
    struct ggml_tensor * sums, struct ggml_tensor * weight, int64_t outer, int64_t inner, int64_t run, float eps,
    bool centered);
/* Its gradient in the weight, of as many elements: of rows, and from statistics and sums. */
struct ggml_tensor * pg_norm_dot_rows(
    struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * x, int64_t inner, float eps, bool centered);
struct ggml_tensor * pg_norm_dot(
    struct ggml_context * ctx, struct ggml_tensor * statistics, struct ggml_tensor * sums, int64_t weights, float eps);
/* Means of the channels (0 if not centered) and mean squared distances from them: (2, channels). */
struct ggml_tensor * pg_norm_statistics(
    struct ggml_context * ctx, struct ggml_tensor * x, int64_t outer, int64_t inner, bool centered);
/* Sums of grad, and of grad * (x - mean), over outer and each run: (2, channels, runs). */
struct ggml_tensor * pg_norm_sums(
    struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * x, struct ggml_tensor * statistics,
    int64_t outer, int64_t inner, int64_t run);

/* Rotary embedding of x (batch, tokens, heads, width): pair k turns by position * base^(-2 k / width), the other way if inverse.
 * Pairs are halves apart, or neighbours if interleaved. positions may be NULL: 0, 1, ... */
struct ggml_tensor * pg_rope(
    struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * positions, float base, bool interleaved,
    bool inverse);

/* scale * x where 24 random bits are not below the threshold, else 0. The bits are a function of the key (seed and draw, two
 * int32 each) and the element's place alone. */
struct ggml_tensor * pg_dropout(
    struct ggml_context * ctx, struct ggml_tensor * key, struct ggml_tensor * x, int32_t threshold, float scale);
/* The same for x = 1, in the shape of `like`. */
struct ggml_tensor * pg_dropout_mask(
    struct ggml_context * ctx, struct ggml_tensor * key, struct ggml_tensor * like, int32_t threshold, float scale);

/* Functions of each element of a contiguous tensor; broadcasting ones take contiguous inputs that NumPy would broadcast. NaN and
 * infinity come out as in NumPy. */
struct ggml_tensor * pg_add(struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * y);
struct ggml_tensor * pg_sub(struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * y);
struct ggml_tensor * pg_mul(struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * y);
struct ggml_tensor * pg_div(struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * y);
struct ggml_tensor * pg_affine(struct ggml_context * ctx, struct ggml_tensor * x, float scale, float shift);
struct ggml_tensor * pg_exp(struct ggml_context * ctx, struct ggml_tensor * x);
struct ggml_tensor * pg_log(struct ggml_context * ctx, struct ggml_tensor * x);
struct ggml_tensor * pg_sign(struct ggml_context * ctx, struct ggml_tensor * x);
/* x^y, broadcasting; and x to the power of one number. */
struct ggml_tensor * pg_pow(struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * y);
struct ggml_tensor * pg_power(struct ggml_context * ctx, struct ggml_tensor * x, float exponent);

/* 1 where x > y, or x == y, else 0; broadcasting. */
struct ggml_tensor * pg_greater(struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * y);
struct ggml_tensor * pg_equal(struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * y);
/* The larger or smaller of two elements; broadcasting. */
struct ggml_tensor * pg_maximum(struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * y);
struct ggml_tensor * pg_minimum(struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * y);
/* x where the condition is not 0, else y; broadcasting. */
struct ggml_tensor * pg_where(
    struct ggml_context * ctx, struct ggml_tensor * condition, struct ggml_tensor * x, struct ggml_tensor * y);
/* x, but at least low and at most high; and its gradient: grad where low < x < high, else 0. */
struct ggml_tensor * pg_clamp(struct ggml_context * ctx, struct ggml_tensor * x, float low, float high);
struct ggml_tensor * pg_clamp_back(
    struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * x, float low, float high);

/* Activations of each element. A _back is the gradient in x, from grad and either x or the result. */
struct ggml_tensor * pg_relu(struct ggml_context * ctx, struct ggml_tensor * x);
struct ggml_tensor * pg_relu_back(struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * result);
/* x for x >= 0; below, slope * x, or alpha * (e^x - 1). */
struct ggml_tensor * pg_leaky_relu(struct ggml_context * ctx, struct ggml_tensor * x, float slope);
struct ggml_tensor * pg_elu(struct ggml_context * ctx, struct ggml_tensor * x, float alpha);
struct ggml_tensor * pg_tanh(struct ggml_context * ctx, struct ggml_tensor * x);
struct ggml_tensor * pg_tanh_back(struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * result);
struct ggml_tensor * pg_sigmoid(struct ggml_context * ctx, struct ggml_tensor * x);
struct ggml_tensor * pg_sigmoid_back(struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * result);
struct ggml_tensor * pg_silu(struct ggml_context * ctx, struct ggml_tensor * x);
struct ggml_tensor * pg_silu_back(struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * x);
struct ggml_tensor * pg_softplus(struct ggml_context * ctx, struct ggml_tensor * x);
/* GELU by the normal distribution function, and by its approximation with tanh. */
struct ggml_tensor * pg_gelu(struct ggml_context * ctx, struct ggml_tensor * x);
struct ggml_tensor * pg_gelu_back(struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * x);
struct ggml_tensor * pg_gelu_tanh(struct ggml_context * ctx, struct ggml_tensor * x);
struct ggml_tensor * pg_gelu_tanh_back(struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * x);

/* Sum over the middle axis of a contiguous (outer, middle, inner): (outer, inner). */
struct ggml_tensor * pg_sum_middle(struct ggml_context * ctx, struct ggml_tensor * x, int64_t outer, int64_t inner);

/* Largest element along the middle axis of a contiguous (outer, middle, inner): (outer, inner). NaN where there is one. */
struct ggml_tensor * pg_max_middle(struct ggml_context * ctx, struct ggml_tensor * x, int64_t outer, int64_t inner);

/* Index of that element, the first of equal ones, or of NaN: int32 (outer, inner). */
struct ggml_tensor * pg_argmax_middle(struct ggml_context * ctx, struct ggml_tensor * x, int64_t outer, int64_t inner);

/* Copies to other places. Axes count from the last, as in ggml; every int64_t array has four entries in that order.
 * pg_contiguous copies x, of four-byte elements with any strides, in the order of its axes.
 * pg_pad sets x, spread to every step-th element, into a tensor of sizes ne full of value; before is where x starts. x may have
 * any strides; the others take contiguous tensors. */
struct ggml_tensor * pg_contiguous(struct ggml_context * ctx, struct ggml_tensor * x);
struct ggml_tensor * pg_pad(
    struct ggml_context * ctx, struct ggml_tensor * x, const int64_t * ne, const int64_t * before, const int64_t * step,
    float value);
/* Up to 9 tensors of one element type, joined along an axis. */
struct ggml_tensor * pg_concat(struct ggml_context * ctx, struct ggml_tensor ** parts, int n, int axis);
/* The entries of x along an axis that int32 indices (count,) name; and its gradient: each entry of grad is added to the place
 * that its index names among `size`, in the order of the indices, so that any number of threads gives the same bits. */
struct ggml_tensor * pg_take(struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * indices, int axis);
struct ggml_tensor * pg_scatter(
    struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * indices, int axis, int64_t size);

/* Convolution of x (images, channels, h, w) with a weight (o, channels / groups, kh, kw) to (images, o, oh, ow), plus a bias (o,)
 * or NULL; its gradient in x (h, w), which is the transposed convolution of grad; and that in the weight (kh, kw). Settings:
 * stride, padding and dilation, each for h and w, then groups. */
struct ggml_tensor * pg_conv2d(
    struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * weight, struct ggml_tensor * bias, int64_t oh,
    int64_t ow, const int32_t * settings);
struct ggml_tensor * pg_conv2d_input(
    struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * weight, int64_t h, int64_t w,
    const int32_t * settings);
struct ggml_tensor * pg_conv2d_weight(
    struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * grad, int64_t kh, int64_t kw,
    const int32_t * settings);

/* For each window of each plane of x, the element of `values` where x is largest (the first such place, or the first NaN); and the
 * gradient in the values: grad added to those places. Settings: kernel, stride and padding, each for h and w. */
struct ggml_tensor * pg_max_pool(
    struct ggml_context * ctx, struct ggml_tensor * values, struct ggml_tensor * x, int64_t oh, int64_t ow,
    const int32_t * settings);
struct ggml_tensor * pg_max_pool_back(
    struct ggml_context * ctx, struct ggml_tensor * grad, struct ggml_tensor * x, const int32_t * settings);
/* The mean of each window, padding counting as zeros; and its gradient in x (h, w). */
struct ggml_tensor * pg_avg_pool(
    struct ggml_context * ctx, struct ggml_tensor * x, int64_t oh, int64_t ow, const int32_t * settings);
struct ggml_tensor * pg_avg_pool_back(
    struct ggml_context * ctx, struct ggml_tensor * grad, int64_t h, int64_t w, const int32_t * settings);

/* A matrix x (columns, k), of any strides, as operand of the recurrent kernels: each of so many groups of its columns is cut into
 * panels of a fixed width, the last one filled up with zeros, each of them contiguous. */
struct ggml_tensor * pg_panels(struct ggml_context * ctx, struct ggml_tensor * x, int64_t groups);
/* All steps of an LSTM, or, where c is NULL, of a GRU. Panels are those of the weights (gates * hidden, hidden) of the state and
 * (gates * hidden, inputs) of the input, a group for each gate; x (steps * batch, inputs), bias (4 * hidden,); h and c (batch,
 * hidden) are the first states. The result holds all states and gates: see recurrent.c. */
struct ggml_tensor * pg_recurrent(
    struct ggml_context * ctx, struct ggml_tensor * h_panels, struct ggml_tensor * x_panels, struct ggml_tensor * x,
    struct ggml_tensor * bias, struct ggml_tensor * h, struct ggml_tensor * c, bool reverse);
/* The gradients in the gates (steps, batch, 4 * hidden), then in the first states, from those in h after each step and in the last
 * c, as they stand in the result of pg_recurrent (kept). panels are those of the state's weight, transposed, in one group. */
struct ggml_tensor * pg_recurrent_back(
    struct ggml_context * ctx, struct ggml_tensor * panels, struct ggml_tensor * grad, struct ggml_tensor * kept, int states,
    bool reverse);

/* One update in place. args: the parameter, its gradient, the method's state, and a table of numbers, whose given row is for this
 * update. The flag makes SGD Nesterov's, RMSprop centered. PG_AVERAGE moves a running average (the parameter) towards the
 * value (the gradient). */
enum pg_method { PG_SGD, PG_ADAMW, PG_LION, PG_RMSPROP, PG_ADAGRAD, PG_AVERAGE };
struct ggml_tensor * pg_update(
    struct ggml_context * ctx, enum pg_method method, struct ggml_tensor ** args, int n_args, int row, bool flag);
/* args: w (..., n, m), its gradient, row (..., n, 1), column (..., 1, m) and three numbers; in place, w becomes
 * keep * w - size * gradient / sqrt(max(row * column, least)). */
struct ggml_tensor * pg_factored_step(struct ggml_context * ctx, struct ggml_tensor ** args);

/* Smallest and largest of n int32 values, in one pass. */
void pg_range_i32(const int32_t * values, int64_t n, int32_t * smallest, int32_t * largest);

/* Whether a tensor's elements lie in order without gaps, by its strides of axes of size 1, too. */
bool pg_is_packed(const struct ggml_tensor * tensor);

/* Memory of tensors that the graph allocator does not own. pg_refresh_views recomputes the address of every view after its
 * base moved; pg_forget_addresses makes the tensors of a graph unallocated again, all but the given ones. */
void pg_refresh_views(struct ggml_cgraph * graph);
void pg_forget_addresses(struct ggml_cgraph * graph, struct ggml_tensor ** keep, int n_keep);

/* ggml's functions of these names; what a driver throws in them becomes GGML_STATUS_FAILED and a message, which is empty
 * otherwise. */
int pg_graph_compute(ggml_backend_t backend, struct ggml_cgraph * graph, char * message, size_t size);
int pg_sched_graph_compute(ggml_backend_sched_t scheduler, struct ggml_cgraph * graph, char * message, size_t size);
int pg_tensor_set(struct ggml_tensor * tensor, const void * data, size_t n_bytes, char * message, size_t size);
int pg_tensor_get(const struct ggml_tensor * tensor, void * data, size_t n_bytes, char * message, size_t size);

/* Places for all tensors of a graph that have no address yet, in one buffer whose size is returned (negative: no memory to
 * plan in). Views have no place of their own; -1 says so. pg_set_addresses moves the tensors to a buffer at base. */
int64_t pg_place_tensors(
    struct ggml_cgraph * graph, int64_t * node_offsets, struct ggml_tensor ** leaves, int n_leaves, int64_t * leaf_offsets);
void pg_set_addresses(
    struct ggml_cgraph * graph, const int64_t * node_offsets, struct ggml_tensor ** leaves, int n_leaves,
    const int64_t * leaf_offsets, void * base);

/* BLAS runs single-threaded: ggml's workers are the only thread pool. */
void pg_use_single_threaded_blas(void);
const char * pg_blas_description(void);

/* A node that marks where a graph begins to change its inputs in place. From there on the run is not stopped any more, so that
 * an update is made whole or not at all. pg_begin_run comes before each run; pg_has_committed comes after it, and tells, once,
 * whether the node was met. */
struct ggml_tensor * pg_commit(struct ggml_context * ctx);
void pg_note_commit(void); /* the same, from outside of a graph */
void pg_begin_run(struct ggml_cgraph * graph);
bool pg_has_committed(void);

/* The graph that runs now, or NULL, and the index of the node in it that the calling worker computes, or -1. Workers are at most
 * one node apart. */
struct ggml_cgraph * pg_running_graph(void);
int pg_running_node(void);

/* ggml's abort callback: every poll_ms milliseconds it lets Python look at its signals (pg_on_poll), and stops the run when
 * that returns true. */
bool pg_poll(void * poll_ms);
