/* How ggml's threads wait for each other, included in front of its C files by build_ggml.py.
 *
 * ggml spins. A thread that spins keeps the core from the one it waits for, where there are more threads than cores or other
 * programs run: a barrier then takes a slice of the scheduler's time, milliseconds, instead of a microsecond. So after some
 * tens of microseconds of spinning the core is offered to others, over and over. */

#pragma once

extern int sched_yield(void); /* not its header: ggml's files define first what headers are to show */

static inline void pg_relax(void) {
    static _Thread_local unsigned rounds;
    if (++rounds % 1024 == 0) {
        sched_yield();
        return;
    }
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#endif
}

/* A call in ggml, which has no argument, becomes ours; its definition, with (void), becomes another function that nobody calls. */
#define ggml_thread_cpu_relax(nothing) ggml_relax_##nothing
#define ggml_relax_ pg_relax()
#define ggml_relax_void ggml_spin_only(void)
