/* The fastest loop of launches that a program can have: what plan.run is measured against.
 * Compiled when a benchmark runs. It needs no CUDA header: everything of CUDA comes in as an address. */
#define _POSIX_C_SOURCE 199309L
#include <time.h>

/* cuLaunchKernelEx: CUresult (const CUlaunchConfig *, CUfunction, void **params, void **extra). */
typedef int (*launch_function)(const void *, void *, void **, void **);

struct launch {
    const void *config; /* CUlaunchConfig, its stream included */
    void *function;     /* CUfunction */
    void **params;      /* one address a parameter */
};

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

/* Makes `count` launches, in order, `repeats` times. Returns the first CUresult that is not 0;
 * *ns is the time of the whole loop in nanoseconds. */
int launch_loop(launch_function launch, const struct launch *launches, int count, int repeats, double *ns) {
    const double began = now_ns();
    for (int r = 0; r < repeats; ++r) {
        for (int i = 0; i < count; ++i) {
            const int code = launch(launches[i].config, launches[i].function, launches[i].params, 0);
            if (code != 0) {
                return code;
            }
        }
    }
    *ns = now_ns() - began;
    return 0;
}
