/* Lets heat spread along a rod whose parts are on several ranks. See smooth_in_c.py. */
#include <math.h>
#include <unisono.h>

#define TIMEOUT_S 60.0
#define CHECK(call)                              \
    do {                                         \
        const unisono_status status = (call);    \
        if (status != UNISONO_OK) return status; \
    } while (0)

/* Gets the temperatures beside this rank's part, part[0] and part[count + 1], from its neighbours.
 * After an error the group has failed, so nothing is cleaned up. */
static unisono_status exchange_ends(unisono_group* group, double* part, int count,
                                    unisono_error* error) {
    const unisono_api* api = group->api;
    const int rank = (int)api->rank(group), ranks = (int)api->ranks(group);
    unisono_request* arriving[2] = {0, 0};
    for (int side = 0; side < 2; ++side) {
        const int peer = side ? rank + 1 : rank - 1;
        if (peer < 0 || peer >= ranks) continue;
        const unisono_message in = {&part[side ? count + 1 : 0], 1, UNISONO_FLOAT64, peer, 0};
        const unisono_message out = {&part[side ? count : 1], 1, UNISONO_FLOAT64, peer, 0};
        CHECK(api->begin_receive(group, &in, TIMEOUT_S, &arriving[side], error));
        CHECK(api->send(group, &out, TIMEOUT_S, error));
    }
    for (int side = 0; side < 2; ++side) {
        if (arriving[side]) CHECK(api->wait(arriving[side], -1, error));
    }
    return UNISONO_OK;
}

/* Moves heat until no temperature of any rank changes by more than `least`. `part` has count + 2
 * temperatures; the first of rank 0 and the last of the last rank do not change. */
unisono_status smooth(unisono_group* group, double* part, int count, double least, long* steps,
                      unisono_error* error) {
    const unisono_api* api = group->api;
    const unisono_collective maximum = {UNISONO_ALL_REDUCE, UNISONO_FLOAT64, UNISONO_MAX, -1, 1};
    unisono_call* call;
    CHECK(api->prepare(group, &maximum, &call, error));
    double change = least;
    for (*steps = 0; change >= least; ++*steps) {
        CHECK(exchange_ends(group, part, count, error));
        double before = part[0], most = 0;
        for (int i = 1; i <= count; ++i) {
            const double own = part[i];
            part[i] = (before + own + part[i + 1]) / 3;
            before = own;
            most = fmax(most, fabs(part[i] - own));
        }
        CHECK(api->run(call, &most, &change, TIMEOUT_S, error));
    }
    api->free_call(call);
    return UNISONO_OK;
}
