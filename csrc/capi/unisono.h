/* The C interface of Unisono: collectives and messages of one rank of a group.
 *
 * A program in Python joins the group and hands it over: `comm.c_interface()` returns a capsule
 * named UNISONO_CAPSULE with a `unisono_group`. All functions are in its table `api`, so a program
 * links to nothing:
 *
 *     unisono_group *group = PyCapsule_GetPointer(capsule, UNISONO_CAPSULE);
 *     unisono_collective sum = {UNISONO_ALL_REDUCE, UNISONO_FLOAT32, UNISONO_SUM, -1, count};
 *     unisono_call *call;
 *     unisono_error error;
 *     if (group->api->prepare(group, &sum, &call, &error) != UNISONO_OK) fail(error.text);
 *     if (group->api->run(call, in, out, 60.0, &error) != UNISONO_OK) fail(error.text);
 *
 * Threads: any thread may call any function, also at the same time, and none needs Python's GIL.
 * `prepare`, `split`, the last `release`, and the first message to each rank of another host take
 * the GIL themselves, so no thread that holds the GIL may wait for them. Signal handlers of Python
 * do not interrupt a wait. All ranks make the same collectives in the same order, as in Python;
 * calls from Python and from C may alternate. Errors: a function that fails returns a status and
 * writes a text of one line. `error` may be NULL. After UNISONO_PEER_LOST, UNISONO_TIMEOUT,
 * UNISONO_MISMATCH and UNISONO_ABORTED the group has failed on all ranks, and later calls fail with
 * the same cause. */
#ifndef UNISONO_H
#define UNISONO_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define UNISONO_VERSION 1u
#define UNISONO_CAPSULE "unisono.group.v1"

/* Statuses. */
enum {
    UNISONO_OK = 0,
    UNISONO_PEER_LOST = 1,
    UNISONO_TIMEOUT = 2,
    UNISONO_MISMATCH = 3,
    UNISONO_ABORTED = 4, /* also: the group is closed */
    UNISONO_INTERRUPTED = 5,
    UNISONO_SYSTEM = 6,  /* no memory, no descriptors, or an error of Python */
    UNISONO_INVALID = 7, /* a wrong argument; the group still works */
    UNISONO_UNSUPPORTED = 9,
    UNISONO_PENDING = 100 /* a request is not done within the limit of `wait` */
};
typedef int32_t unisono_status;

/* Operations. */
enum {
    UNISONO_ALL_REDUCE = 0,
    UNISONO_REDUCE_SCATTER = 1,
    UNISONO_ALL_GATHER = 2,
    UNISONO_ALL_TO_ALL = 3,
    UNISONO_BROADCAST = 4,
    UNISONO_REDUCE = 5,
    UNISONO_GATHER = 6,
    UNISONO_SCATTER = 7,
    UNISONO_BARRIER = 8,
    UNISONO_SCAN = 9,
    UNISONO_EXSCAN = 10
};

/* Types of elements. */
enum {
    UNISONO_FLOAT32 = 0,
    UNISONO_FLOAT64 = 1,
    UNISONO_FLOAT16 = 2,
    UNISONO_BFLOAT16 = 3,
    UNISONO_INT8 = 4,
    UNISONO_UINT8 = 5,
    UNISONO_INT16 = 6,
    UNISONO_UINT16 = 7,
    UNISONO_INT32 = 8,
    UNISONO_UINT32 = 9,
    UNISONO_INT64 = 10,
    UNISONO_UINT64 = 11,
    UNISONO_BOOL = 12,
    UNISONO_COMPLEX64 = 13,
    UNISONO_COMPLEX128 = 14,
    UNISONO_FLOAT8_E4M3FN = 15,
    UNISONO_FLOAT8_E5M2 = 16
};

/* Reductions. Logical ones give 0 or 1. */
enum {
    UNISONO_SUM = 0,
    UNISONO_PROD = 1,
    UNISONO_MIN = 2,
    UNISONO_MAX = 3,
    UNISONO_AVG = 4,
    UNISONO_BAND = 5,
    UNISONO_BOR = 6,
    UNISONO_BXOR = 7,
    UNISONO_LAND = 8,
    UNISONO_LOR = 9,
    UNISONO_LXOR = 10
};

#define UNISONO_ANY_SOURCE (-1)
#define UNISONO_ANY_TAG UINT64_MAX

typedef struct unisono_group unisono_group;
typedef struct unisono_call unisono_call;       /* a collective without its memory */
typedef struct unisono_request unisono_request; /* a call or a message that has begun */

typedef struct unisono_error {
    char text[1024];
} unisono_error;

/* The arguments of a collective, equal on all ranks. */
typedef struct unisono_collective {
    uint32_t op;
    uint32_t dtype;
    uint32_t reduction; /* ignored by operations that reduce nothing */
    int32_t root;       /* a rank for BROADCAST, REDUCE, GATHER and SCATTER, otherwise ignored */
    uint64_t count;     /* elements of a whole array, or of one rank's piece; see `run` */
} unisono_collective;

/* A message. The sender and the receiver state the same type and count. */
typedef struct unisono_message {
    void* data; /* a send only reads it */
    uint64_t count;
    uint32_t dtype;
    int32_t peer; /* a rank; a receive may have UNISONO_ANY_SOURCE */
    uint64_t tag; /* below 2^63; a receive may have UNISONO_ANY_TAG */
} unisono_message;

/* Later versions add functions at the end and keep these. `size` is the number of bytes that the
 * library knows: a function whose place is behind it does not exist. */
typedef struct unisono_api {
    uint32_t size;
    uint32_t version; /* UNISONO_VERSION of the library */

    uint32_t (*rank)(const unisono_group* group);
    uint32_t (*ranks)(const unisono_group* group);

    /* Adds and removes an owner. The capsule is the first one. The last owner's `release` frees the
     * group, whose calls must be freed and whose requests must be done before. */
    void (*retain)(unisono_group* group);
    void (*release)(unisono_group* group);

    /* Prepares a collective: chooses its algorithm, and checks its arguments. Does not communicate.
     * A call may be run often, with any memory. Equal arguments give equal calls, which `free_call`
     * frees one by one. Takes the GIL. */
    unisono_status (*prepare)(unisono_group* group, const unisono_collective* collective,
                              unisono_call** call, unisono_error* error);
    void (*free_call)(unisono_call* call);

    /* Runs a call and waits for its end, for at most `timeout_s` seconds; then the group fails.
     * Allocates no memory for up to 4 ranks. With n ranks, `in` and `out` have, in elements:
     *
     *     operation                                  in              out
     *     ALL_REDUCE, SCAN, EXSCAN, REDUCE           count           count
     *     REDUCE_SCATTER, SCATTER                    n x count       count
     *     ALL_GATHER, GATHER                         count           n x count
     *     ALL_TO_ALL                                 n x count       n x count
     *     BROADCAST                                  count (root)    count (others)
     *
     * Where only the root has a result (REDUCE, GATHER), `out` is ignored on the others, and where
     * only the root has an input (BROADCAST, SCATTER), `in`; the root of a BROADCAST ignores `out`.
     * `in` and `out` may be the same memory for ALL_REDUCE, REDUCE, SCAN and EXSCAN; a piece may be
     * at its own place in the whole for ALL_GATHER and REDUCE_SCATTER. Other overlaps are refused.
     * EXSCAN does not write on rank 0. BARRIER uses no memory. */
    unisono_status (*run)(unisono_call* call, const void* in, void* out, double timeout_s,
                          unisono_error* error);
    /* Begins a call, for `wait` and `test`. The memory must stay until the request is done. */
    unisono_status (*begin)(unisono_call* call, const void* in, void* out, double timeout_s,
                            unisono_request** request, unisono_error* error);

    /* Send and receive a message, and wait for its end. `source` and `tag` of `receive` may be
     * NULL, and get those of the message. */
    unisono_status (*send)(unisono_group* group, const unisono_message* message, double timeout_s,
                           unisono_error* error);
    unisono_status (*receive)(unisono_group* group, const unisono_message* message,
                              double timeout_s, int32_t* source, uint64_t* tag,
                              unisono_error* error);
    unisono_status (*begin_send)(unisono_group* group, const unisono_message* message,
                                 double timeout_s, unisono_request** request, unisono_error* error);
    unisono_status (*begin_receive)(unisono_group* group, const unisono_message* message,
                                    double timeout_s, unisono_request** request,
                                    unisono_error* error);

    /* Waits for a request for at most `limit_s` seconds; below 0: as long as its timeout permits.
     * UNISONO_PENDING: it is not done. Any other status ends the request and frees it. */
    unisono_status (*wait)(unisono_request* request, double limit_s, unisono_error* error);
    /* The same without waiting; moves messages on. */
    unisono_status (*test)(unisono_request* request, unisono_error* error);

    /* Divides the group, as MPI_Comm_split does: `part` gets the group of this rank's color, in the
     * order of `key`, or NULL for a negative color. Collective. The caller owns the new group.
     * Takes the GIL. */
    unisono_status (*split)(unisono_group* group, int32_t color, int32_t key, unisono_group** part,
                            unisono_error* error);
    /* Ends all calls of all ranks with UNISONO_ABORTED and this reason. */
    void (*abort)(unisono_group* group, const char* reason);
} unisono_api;

/* The beginning of every group. */
struct unisono_group {
    const unisono_api* api;
};

#ifdef __cplusplus
}
#endif
#endif
