/* ggml's Vulkan backend passes on a driver's failures (a lost device, memory that ran out) as C++ exceptions. None may reach
 * Python's C code, which would end the process: here they become a message. */

#include <cstdio>
#include <exception>

#include "ggml-backend.h"
#include "ggml.h"

extern "C" {
#include "kernels.h"
}

template <typename Function> static int guarded(char * message, size_t size, Function function) {
    message[0] = 0;
    try {
        return function();
    } catch (const std::exception & error) {
        snprintf(message, size, "%s", error.what());
    } catch (...) {
        snprintf(message, size, "an error without a message");
    }
    return GGML_STATUS_FAILED;
}

/* A driver is not stopped in the middle of a graph: when it has run one, it has made the graph's changes. */
static int finished(enum ggml_status status) {
    if (status == GGML_STATUS_SUCCESS) {
        pg_note_commit();
    }
    return (int) status;
}

int pg_graph_compute(ggml_backend_t backend, struct ggml_cgraph * graph, char * message, size_t size) {
    return guarded(message, size, [&] { return finished(ggml_backend_graph_compute(backend, graph)); });
}

int pg_sched_graph_compute(ggml_backend_sched_t scheduler, struct ggml_cgraph * graph, char * message, size_t size) {
    return guarded(message, size, [&] { return finished(ggml_backend_sched_graph_compute(scheduler, graph)); });
}

int pg_tensor_set(struct ggml_tensor * tensor, const void * data, size_t n_bytes, char * message, size_t size) {
    return guarded(message, size, [&] {
        ggml_backend_tensor_set(tensor, data, 0, n_bytes);
        return (int) GGML_STATUS_SUCCESS;
    });
}

int pg_tensor_get(const struct ggml_tensor * tensor, void * data, size_t n_bytes, char * message, size_t size) {
    return guarded(message, size, [&] {
        ggml_backend_tensor_get(tensor, data, 0, n_bytes);
        return (int) GGML_STATUS_SUCCESS;
    });
}
