/* What the Python side needs besides kernels. */

#include "common.h"
#include <time.h>
#include "cblas.h"

void pg_range_i32(const int32_t * values, int64_t n, int32_t * smallest, int32_t * largest) {
    int32_t lo = values[0], hi = values[0];
    for (int64_t i = 1; i < n; i++) {
        lo = MIN(lo, values[i]);
        hi = MAX(hi, values[i]);
    }
    *smallest = lo;
    *largest  = hi;
}

bool pg_is_packed(const struct ggml_tensor * tensor) {
    size_t stride = ggml_type_size(tensor->type);
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        if (tensor->nb[i] != stride) {
            return false;
        }
        stride *= (size_t) tensor->ne[i];
    }
    return true;
}

void pg_refresh_views(struct ggml_cgraph * graph) {
    const int n = ggml_graph_n_nodes(graph);
    for (int i = 0; i < n; i++) {
        struct ggml_tensor * node = ggml_graph_node(graph, i);
        if (node->view_src != NULL) {
            node->data   = (char *) node->view_src->data + node->view_offs;
            node->buffer = node->view_src->buffer;
        }
    }
}

void pg_forget_addresses(struct ggml_cgraph * graph, struct ggml_tensor ** keep, int n_keep) {
    const int n = ggml_graph_n_nodes(graph);
    for (int i = 0; i < n; i++) {
        struct ggml_tensor * node = ggml_graph_node(graph, i);
        bool kept = false;
        for (int j = 0; j < n_keep && !kept; j++) {
            kept = keep[j] == node;
        }
        if (!kept) {
            node->data   = NULL;
            node->buffer = NULL;
        }
    }
}

void pg_use_single_threaded_blas(void) {
    scipy_openblas_set_num_threads(1);
}

const char * pg_blas_description(void) {
    return scipy_openblas_get_config();
}

/* ggml's first worker is the thread that called it, so each calling thread has a mark of its own. */
static _Thread_local bool committed;

static void run_commit(struct ggml_tensor * dst, int ith, int nth, void * unused) {
    (void) nth, (void) unused;
    if (ith == 0) {
        committed = true;
        *(float *) dst->data = 0.0f;
    }
}

void pg_note_commit(void) {
    committed = true;
}

struct ggml_tensor * pg_commit(struct ggml_context * ctx) {
    return ggml_custom_4d(ctx, GGML_TYPE_F32, 1, 1, 1, 1, NULL, 0, run_commit, 1, NULL);
}

/* The run that began last, for the report of one that ggml ends: its graph, and how many of its nodes are done. Any of ggml's
 * workers may end it, so these are not marks of a thread. */
static struct ggml_cgraph * running;
static volatile int         n_done;

void pg_begin_run(struct ggml_cgraph * graph) {
    committed = false;
    running   = graph;
    n_done    = 0;
}

bool pg_has_committed(void) {
    const bool answer = committed;
    committed = false;
    running   = NULL;
    return answer;
}

static bool takes_time(enum ggml_op op) { /* ggml does not call pg_poll after the others */
    return op != GGML_OP_NONE && op != GGML_OP_RESHAPE && op != GGML_OP_TRANSPOSE && op != GGML_OP_VIEW && op != GGML_OP_PERMUTE;
}

struct ggml_cgraph * pg_running_graph(void) {
    return running;
}

int pg_running_node(void) {
    int       skip = n_done;
    const int n    = running == NULL ? 0 : ggml_graph_n_nodes(running);
    for (int i = 0; i < n; i++) {
        if (takes_time(ggml_graph_node(running, i)->op) && skip-- == 0) {
            return i;
        }
    }
    return -1;
}

extern int pg_on_poll(void); /* Python, in _ffi/__init__.py: runs pending signal handlers; true to stop */

bool pg_poll(void * poll_ms) {
    static _Thread_local int64_t next;
    n_done = n_done + 1;
    if (committed) {
        return false;
    }
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t ms = (int64_t) now.tv_sec * 1000 + now.tv_nsec / 1000000;
    if (ms < next) {
        return false;
    }
    next = ms + (int64_t) (intptr_t) poll_ms;
    return pg_on_poll() != 0;
}
