/* A driver that loses its device: preloaded, it makes vkQueueSubmit fail once the file that LOSE_DEVICE names is there. */

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void (*function)(void);
typedef function (*getter)(void *, const char *);

static int (*submit)(void *, unsigned, const void *, void *);
static getter from_instance, from_device;

static int failing_submit(void * queue, unsigned count, const void * submits, void * fence) {
    const char * file = getenv("LOSE_DEVICE");
    if (file != NULL && access(file, F_OK) == 0) {
        return -4; /* VK_ERROR_DEVICE_LOST */
    }
    return submit(queue, count, submits, fence);
}

static function wrapped(const char * name, function found) {
    if (found != NULL && strcmp(name, "vkQueueSubmit") == 0) {
        submit = (int (*)(void *, unsigned, const void *, void *)) found;
        return (function) failing_submit;
    }
    return found;
}

function vkGetDeviceProcAddr(void * device, const char * name) {
    if (from_device == NULL) {
        from_device = (getter) dlsym(dlopen("libvulkan.so.1", RTLD_LAZY), "vkGetDeviceProcAddr");
    }
    return wrapped(name, from_device(device, name));
}

function vkGetInstanceProcAddr(void * instance, const char * name) {
    if (from_instance == NULL) {
        from_instance = (getter) dlsym(dlopen("libvulkan.so.1", RTLD_LAZY), "vkGetInstanceProcAddr");
    }
    if (strcmp(name, "vkGetDeviceProcAddr") == 0) {
        return (function) vkGetDeviceProcAddr;
    }
    return wrapped(name, from_instance(instance, name));
}
