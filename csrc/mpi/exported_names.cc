// The constants of MPI's ABI, and the functions that the library does not serve.
#include <cstdio>
#include <cstdlib>

#include "capi/unisono.h"
#include "mpi/names.h"
#include "mpi/unserved_names.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

[[noreturn]] void refuse(const char* name) {
    std::fprintf(stderr,
                 "unisono: %s is not served: this library has the functions that JAX's collectives "
                 "call; other programs need a whole MPI\n",
                 name);
    std::abort();
}

}  // namespace

namespace unisono::mpi {

// ---- constants. The trampoline reads each from its address.

#define CONSTANT(name, value) EXPORTED const uintptr_t name = static_cast<uintptr_t>(value);

CONSTANT(MPIABI_SUCCESS, kSuccess)
CONSTANT(MPIABI_UNDEFINED, kUndefined)
CONSTANT(MPIABI_ANY_SOURCE, UNISONO_ANY_SOURCE)
CONSTANT(MPIABI_ANY_TAG, -1)
CONSTANT(MPIABI_PROC_NULL, -2)
CONSTANT(MPIABI_THREAD_SINGLE, 0)
CONSTANT(MPIABI_THREAD_FUNNELED, 1)
CONSTANT(MPIABI_THREAD_SERIALIZED, 2)
CONSTANT(MPIABI_THREAD_MULTIPLE, kMultiple)
CONSTANT(MPIABI_COMM_NULL, kNullComm)
CONSTANT(MPIABI_COMM_WORLD, kWorld)
CONSTANT(MPIABI_REQUEST_NULL, kNullRequest)
CONSTANT(MPIABI_STATUS_IGNORE, 0)
CONSTANT(MPIABI_IN_PLACE, 1)
CONSTANT(MPIABI_BYTE, kFirstType + UNISONO_UINT8)
CONSTANT(MPIABI_INT8_T, kFirstType + UNISONO_INT8)
CONSTANT(MPIABI_UINT8_T, kFirstType + UNISONO_UINT8)
CONSTANT(MPIABI_INT16_T, kFirstType + UNISONO_INT16)
CONSTANT(MPIABI_UINT16_T, kFirstType + UNISONO_UINT16)
CONSTANT(MPIABI_INT32_T, kFirstType + UNISONO_INT32)
CONSTANT(MPIABI_UINT32_T, kFirstType + UNISONO_UINT32)
CONSTANT(MPIABI_INT64_T, kFirstType + UNISONO_INT64)
CONSTANT(MPIABI_UINT64_T, kFirstType + UNISONO_UINT64)
CONSTANT(MPIABI_FLOAT, kFirstType + UNISONO_FLOAT32)
CONSTANT(MPIABI_DOUBLE, kFirstType + UNISONO_FLOAT64)
CONSTANT(MPIABI_C_COMPLEX, kFirstType + UNISONO_COMPLEX64)
CONSTANT(MPIABI_C_DOUBLE_COMPLEX, kFirstType + UNISONO_COMPLEX128)
CONSTANT(MPIABI_SUM, kFirstReduction + UNISONO_SUM)
CONSTANT(MPIABI_PROD, kFirstReduction + UNISONO_PROD)
CONSTANT(MPIABI_MIN, kFirstReduction + UNISONO_MIN)
CONSTANT(MPIABI_MAX, kFirstReduction + UNISONO_MAX)

#define UNSERVED_CONSTANT(name) CONSTANT(name, kFirstUnserved + __COUNTER__)
UNSERVED_CONSTANTS(UNSERVED_CONSTANT)

EXPORTED const int mpiwrapper_version_major = 2, mpiwrapper_version_minor = 10,
                   mpiwrapper_version_patch = 0;
EXPORTED const int mpiabi_version_major = 2, mpiabi_version_minor = 10, mpiabi_version_patch = 0;
EXPORTED void mpiwrapper_export_fortran_constants_() {}

// ---- functions that JAX does not call

#define UNSERVED_FUNCTION(name) \
    EXPORTED void name() {      \
        refuse(#name);          \
    }
UNSERVED_FUNCTIONS(UNSERVED_FUNCTION)

}  // namespace unisono::mpi
