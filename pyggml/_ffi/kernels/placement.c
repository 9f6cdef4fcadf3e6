/* Where the tensors of a graph stand in one working buffer.
 *
 * ggml's own allocator ends the process when a graph leaves more than 256 holes between the values that are alive (a recurrent
 * network of some hundred steps does), so this one keeps a list of any length. Tensors are placed in the order of the graph,
 * each in the smallest hole that holds it; an elementwise op takes the place of an input that dies with it. */

#include <stdlib.h>

#include "common.h"

enum { NOWHERE = -1 };

struct life {
    struct ggml_tensor * tensor; /* never a view */
    int                  first, last; /* nodes that use it */
    int                  next; /* another life with the same last use, or NOWHERE */
    int64_t              offset;
};

struct hole {
    int64_t offset, size;
};

struct placement {
    struct life * lives;
    int           n_lives;
    int *         table; /* hash table: pointer of a tensor -> index into lives, or NOWHERE */
    size_t        table_size; /* a power of two */
    struct hole * holes; /* by offset */
    int           n_holes, max_holes;
    int64_t       end; /* of the buffer so far */
};

static const struct ggml_tensor * base_of(const struct ggml_tensor * tensor) {
    return tensor->view_src != NULL ? tensor->view_src : tensor;
}

static int * slot_of(struct placement * p, const struct ggml_tensor * tensor) {
    size_t i = ((uintptr_t) tensor >> 4) * (uintptr_t) 0x9E3779B97F4A7C15u & (p->table_size - 1);
    while (p->table[i] != NOWHERE && p->lives[p->table[i]].tensor != tensor) {
        i = (i + 1) & (p->table_size - 1);
    }
    return &p->table[i];
}

/* Note that node i uses a tensor. Tensors with an address are somebody else's. */
static void use(struct placement * p, const struct ggml_tensor * tensor, int i) {
    struct ggml_tensor * base = (struct ggml_tensor *) base_of(tensor);
    if (base->data != NULL) {
        return;
    }
    int * slot = slot_of(p, base);
    if (*slot == NOWHERE) {
        *slot = p->n_lives;
        p->lives[p->n_lives++] = (struct life) {base, i, i, NOWHERE, NOWHERE};
    }
    p->lives[*slot].last = i;
}

static int64_t take_place(struct placement * p, int64_t size) {
    int best = NOWHERE;
    for (int h = 0; h < p->n_holes; h++) {
        if (p->holes[h].size >= size && (best == NOWHERE || p->holes[h].size < p->holes[best].size)) {
            best = h;
        }
    }
    if (best != NOWHERE) {
        const int64_t offset = p->holes[best].offset;
        p->holes[best].offset += size;
        p->holes[best].size -= size;
        if (p->holes[best].size == 0) {
            memmove(&p->holes[best], &p->holes[best + 1], (--p->n_holes - best) * sizeof(struct hole));
        }
        return offset;
    }
    /* grow; a hole at the end of the buffer is part of the new place */
    int64_t offset = p->end;
    if (p->n_holes > 0 && p->holes[p->n_holes - 1].offset + p->holes[p->n_holes - 1].size == p->end) {
        offset = p->holes[--p->n_holes].offset;
    }
    p->end = offset + size;
    return offset;
}

static bool free_place(struct placement * p, int64_t offset, int64_t size) {
    int h = 0; /* the first hole behind the place */
    for (int low = 0, high = p->n_holes; low < high;) {
        const int middle = (low + high) / 2;
        if (p->holes[middle].offset < offset) {
            low = middle + 1;
        } else {
            high = middle;
        }
        h = low;
    }
    const bool joins_before = h > 0 && p->holes[h - 1].offset + p->holes[h - 1].size == offset;
    const bool joins_behind = h < p->n_holes && offset + size == p->holes[h].offset;
    if (joins_before && joins_behind) {
        p->holes[h - 1].size += size + p->holes[h].size;
        memmove(&p->holes[h], &p->holes[h + 1], (--p->n_holes - h) * sizeof(struct hole));
    } else if (joins_before) {
        p->holes[h - 1].size += size;
    } else if (joins_behind) {
        p->holes[h].offset = offset;
        p->holes[h].size += size;
    } else {
        if (p->n_holes == p->max_holes) {
            const int n = 2 * p->max_holes;
            struct hole * holes = realloc(p->holes, n * sizeof(struct hole));
            if (holes == NULL) {
                return false;
            }
            p->holes     = holes;
            p->max_holes = n;
        }
        memmove(&p->holes[h + 1], &p->holes[h], (p->n_holes++ - h) * sizeof(struct hole));
        p->holes[h] = (struct hole) {offset, size};
    }
    return true;
}

static bool works_in_place(const struct ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_ADD: case GGML_OP_SUB: case GGML_OP_MUL: case GGML_OP_DIV: case GGML_OP_SCALE: case GGML_OP_SQR:
        case GGML_OP_SQRT: case GGML_OP_LOG: case GGML_OP_SIN: case GGML_OP_COS: case GGML_OP_UNARY:
            return true;
        case GGML_OP_CUSTOM:
            return get_param_i32(node, IN_PLACE_PARAM) == 1;
        default:
            return false;
    }
}

/* Whether a node reads the elements of an input in another order too, by way of a view. */
static bool reads_otherwise(const struct ggml_tensor * node, const struct ggml_tensor * input) {
    for (int s = 0; s < GGML_MAX_SRC; s++) {
        const struct ggml_tensor * other = node->src[s];
        if (other != NULL && other->view_src == input &&
            (other->view_offs != 0 || !ggml_are_same_shape(other, node) || !ggml_is_contiguous(other))) {
            return true;
        }
    }
    return false;
}

/* Return the input of node i whose place the result can take, or NULL. */
static struct life * dying_input(struct placement * p, const struct ggml_tensor * node, int i) {
    if (!works_in_place(node)) {
        return NULL;
    }
    for (int s = 0; s < GGML_MAX_SRC; s++) {
        const struct ggml_tensor * input = node->src[s];
        if (input == NULL || input->view_src != NULL || input->data != NULL || input->type != node->type ||
            !ggml_are_same_shape(input, node) || !ggml_is_contiguous(input) || !ggml_is_contiguous(node) ||
            reads_otherwise(node, input)) {
            continue;
        }
        struct life * life = &p->lives[*slot_of(p, input)];
        if (life->last == i && life->first < i && life->offset != NOWHERE) {
            return life;
        }
    }
    return NULL;
}

static int64_t padded_size(const struct ggml_tensor * tensor) {
    const int64_t line = CACHE_LINE * sizeof(float);
    return ((int64_t) ggml_nbytes(tensor) + line - 1) / line * line;
}

static bool place_all(struct placement * p, int n_nodes, struct ggml_cgraph * graph, int * dies_at) {
    for (int i = 0; i < n_nodes; i++) {
        dies_at[i] = NOWHERE;
    }
    for (int l = 0; l < p->n_lives; l++) {
        p->lives[l].next          = dies_at[p->lives[l].last];
        dies_at[p->lives[l].last] = l;
    }
    for (int i = 0, l = 0; i < n_nodes; i++) {
        for (; l < p->n_lives && p->lives[l].first == i; l++) { /* lives are in the order of their first use */
            struct life * life = &p->lives[l];
            const struct ggml_tensor * node = ggml_graph_node(graph, i);
            struct life * input = life->tensor == node ? dying_input(p, node, i) : NULL;
            if (input != NULL) {
                life->offset  = input->offset;
                input->offset = NOWHERE - 1 - input->offset; /* negative: nothing left to free */
            } else {
                life->offset = take_place(p, padded_size(life->tensor));
            }
        }
        for (int d = dies_at[i]; d != NOWHERE; d = p->lives[d].next) {
            if (p->lives[d].offset >= 0 && !free_place(p, p->lives[d].offset, padded_size(p->lives[d].tensor))) {
                return false;
            }
        }
    }
    return true;
}

int64_t pg_place_tensors(
    struct ggml_cgraph * graph, int64_t * node_offsets, struct ggml_tensor ** leaves, int n_leaves, int64_t * leaf_offsets) {
    const int n_nodes = ggml_graph_n_nodes(graph);
    struct placement p = {0};
    p.table_size = 16;
    while (p.table_size < 2 * ((size_t) n_nodes + n_leaves)) {
        p.table_size *= 2;
    }
    p.max_holes   = 64;
    p.lives       = malloc((n_nodes + n_leaves + 1) * sizeof(struct life));
    p.table       = malloc(p.table_size * sizeof(int));
    p.holes       = malloc(p.max_holes * sizeof(struct hole));
    int * dies_at = malloc((n_nodes + 1) * sizeof(int));
    bool ok = p.lives != NULL && p.table != NULL && p.holes != NULL && dies_at != NULL;
    if (ok) {
        memset(p.table, 0xFF, p.table_size * sizeof(int)); /* NOWHERE everywhere */
        for (int i = 0; i < n_nodes; i++) {
            const struct ggml_tensor * node = ggml_graph_node(graph, i);
            for (int s = 0; s < GGML_MAX_SRC; s++) {
                if (node->src[s] != NULL) {
                    use(&p, node->src[s], i);
                }
            }
            use(&p, node, i);
        }
        ok = place_all(&p, n_nodes, graph, dies_at);
    }
    for (int i = 0; ok && i < n_nodes + n_leaves; i++) {
        const struct ggml_tensor * tensor = i < n_nodes ? ggml_graph_node(graph, i) : leaves[i - n_nodes];
        const bool is_ours = tensor->view_src == NULL && tensor->data == NULL;
        const int l = is_ours ? *slot_of(&p, tensor) : NOWHERE;
        int64_t offset = l == NOWHERE ? NOWHERE : p.lives[l].offset;
        if (offset < NOWHERE) {
            offset = NOWHERE - 1 - offset; /* its place went on to a result */
        }
        *(i < n_nodes ? &node_offsets[i] : &leaf_offsets[i - n_nodes]) = offset;
    }
    const int64_t size = ok ? p.end : NOWHERE;
    free(p.lives);
    free(p.table);
    free(p.holes);
    free(dies_at);
    return size;
}

void pg_set_addresses(
    struct ggml_cgraph * graph, const int64_t * node_offsets, struct ggml_tensor ** leaves, int n_leaves,
    const int64_t * leaf_offsets, void * base) {
    const int n_nodes = ggml_graph_n_nodes(graph);
    for (int i = 0; i < n_nodes; i++) {
        if (node_offsets[i] != NOWHERE) {
            ggml_graph_node(graph, i)->data = (char *) base + node_offsets[i];
        }
    }
    for (int i = 0; i < n_leaves; i++) {
        leaves[i]->data = leaf_offsets[i] != NOWHERE ? (char *) base + leaf_offsets[i] : NULL;
    }
}
