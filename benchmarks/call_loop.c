/* Runs an all_reduce of float32 often. See c_interface.py. */
#include <time.h>
#include <unisono.h>

/* Returns the seconds of a call, or a negative number after an error, whose text it writes. */
double call_loop(unisono_group* group, float* x, uint64_t count, int calls, unisono_error* error) {
    const unisono_collective sum = {UNISONO_ALL_REDUCE, UNISONO_FLOAT32, UNISONO_SUM, -1, count};
    unisono_call* call;
    struct timespec begin, end;
    if (group->api->prepare(group, &sum, &call, error) != UNISONO_OK) return -1;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int i = 0; i < calls; ++i) {
        if (group->api->run(call, x, x, 60, error) != UNISONO_OK) return -1;
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    group->api->free_call(call);
    return ((double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec)) /
           calls;
}
