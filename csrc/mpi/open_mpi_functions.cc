// The functions and objects of Open MPI that MLX's collectives use. MLX calls them from the threads
// of its streams and ignores what they return, so an error ends the process with its text.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "mpi/comm_world.h"
#include "mpi/names.h"
#include "mpi/open_mpi_operators.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace unisono::mpi {
namespace {

// Returns a copy that lives as long as the process: MLX frees no type and no operator.
template <class T>
const T* kept(T made) {
    static std::mutex mutex;
    static auto& all = *new std::deque<T>;
    const std::lock_guard lock(mutex);
    return &all.emplace_back(std::move(made));
}

constexpr int kExitStatus = 1;
constexpr auto kFlushLimit = std::chrono::seconds(1);
constexpr int kAnyTag = -1;

struct Type {
    uint32_t dtype;
    size_t bytes;
};

struct Operator {
    UserFunction function;
    std::optional<Reduction> known;  // by its dtype, where the operator has one type only
    std::optional<uint32_t> any_type;
};

std::atomic<bool> is_in_use{false};

// Python's output is lost without this. Another thread may hold the GIL for long, hence the limit.
void flush_python() {
    if (!program().flush) return;
    const auto done = std::make_shared<std::promise<void>>();
    auto flushed = done->get_future();
    std::thread([done] {
        program().flush();
        done->set_value();
    }).detach();
    flushed.wait_for(kFlushLimit);
}

[[noreturn]] void end_process(const std::string& text) {
    static auto& first = *new std::mutex;
    first.lock();  // for good: the first error ends the process
    const int rank = world() ? world()->rank() : 0;
    const std::string line = "unisono.mlx: rank " + std::to_string(rank) + ": " + text + "\n";
    flush_python();
    std::fwrite(line.data(), 1, line.size(), stderr);
    std::fflush(stderr);
    ::_exit(kExitStatus);
}

// When the interpreter has ended, nothing reads the results, and the group has left.
int done(int code) {
    if (code != kSuccess && !has_ended()) end_process(text_of(code));
    return code;
}

Communicator& of(void* comm);

int collective(void* comm, uint32_t op, Reduction reduction, const void* in, void* out, int count) {
    if (count < 0) end_process("expected at most 2^31 - 1 elements, MPI's limit, got more");
    const unisono_collective made{op, reduction.dtype, reduction.reduction, -1,
                                  static_cast<uint64_t>(count)};
    return of(comm).run(made, in, out);
}

// Combines the arrays of all ranks in their order.
int combine_gathered(void* comm, const Type& type, UserFunction function, const void* in, void* out,
                     int count) {
    const auto ranks = static_cast<size_t>(of(comm).ranks());
    const size_t bytes = static_cast<size_t>(count) * type.bytes;
    std::vector<std::byte> all(ranks * bytes);
    const int code =
        collective(comm, UNISONO_ALL_GATHER, {type.dtype, UNISONO_SUM}, in, all.data(), count);
    if (code != kSuccess) return code;
    std::memcpy(out, all.data(), bytes);
    void* handle = const_cast<Type*>(&type);
    for (size_t rank = 1; rank < ranks; ++rank)
        function(all.data() + rank * bytes, out, &count, &handle);
    return kSuccess;
}

unisono_message message_of(const void* data, int count, const void* type, int peer, int tag) {
    if (count < 0) end_process("expected at most 2^31 - 1 elements, MPI's limit, got more");
    return {const_cast<void*>(data), static_cast<uint64_t>(count),
            static_cast<const Type*>(type)->dtype, peer,
            tag == kAnyTag ? UNISONO_ANY_TAG : static_cast<uint64_t>(tag)};
}

}  // namespace

// ---- objects. A handle of Open MPI is the address of an object.

#define TYPE(name, dtype, bytes) EXPORTED const Type name{dtype, bytes};
TYPE(ompi_mpi_c_bool, UNISONO_BOOL, 1)
TYPE(ompi_mpi_int8_t, UNISONO_INT8, 1)
TYPE(ompi_mpi_uint8_t, UNISONO_UINT8, 1)
TYPE(ompi_mpi_int16_t, UNISONO_INT16, 2)
TYPE(ompi_mpi_uint16_t, UNISONO_UINT16, 2)
TYPE(ompi_mpi_int32_t, UNISONO_INT32, 4)
TYPE(ompi_mpi_uint32_t, UNISONO_UINT32, 4)
TYPE(ompi_mpi_int64_t, UNISONO_INT64, 8)
TYPE(ompi_mpi_uint64_t, UNISONO_UINT64, 8)
TYPE(ompi_mpi_float, UNISONO_FLOAT32, 4)
TYPE(ompi_mpi_double, UNISONO_FLOAT64, 8)
TYPE(ompi_mpi_c_complex, UNISONO_COMPLEX64, 8)

#define OPERATOR(name, reduction) EXPORTED const Operator name{nullptr, std::nullopt, reduction};
OPERATOR(ompi_mpi_op_sum, UNISONO_SUM)
OPERATOR(ompi_mpi_op_max, UNISONO_MAX)
OPERATOR(ompi_mpi_op_min, UNISONO_MIN)

EXPORTED const char ompi_mpi_comm_world = 0;

namespace {

Communicator& of(void* comm) {
    Communicator* const found =
        comm == &ompi_mpi_comm_world ? world() : static_cast<Communicator*>(comm);
    if (!found) end_process("this communicator does not exist");
    return *found;
}

}  // namespace

// ---- a function for Python

// Returns 1 if MLX has loaded this library.
EXPORTED int unisono_mpi_is_in_use() {
    return is_in_use;
}

// ---- functions of MPI

EXPORTED int MPI_Get_library_version(char* version, int* length) {
    constexpr char kVersion[] = "Unisono, compatible with Open MPI";
    std::memcpy(version, kVersion, sizeof kVersion);
    *length = sizeof kVersion - 1;
    is_in_use = true;
    return kSuccess;
}

EXPORTED int MPI_Init(int*, char***) {
    if (world()) return kSuccess;
    std::string error;
    Communicator* const joined = join_world(error);
    if (!joined && !error.empty()) end_process(error);
    set_world(joined ? joined : new Communicator("this process is alone"));
    return kSuccess;
}

EXPORTED int MPI_Finalize() {
    return kSuccess;  // the group leaves with its communicator in Python
}

EXPORTED int MPI_Comm_rank(void* comm, int* rank) {
    *rank = of(comm).rank();
    return kSuccess;
}

EXPORTED int MPI_Comm_size(void* comm, int* size) {
    *size = of(comm).ranks();
    return kSuccess;
}

// MLX raises an error without a text after a code.
EXPORTED int MPI_Comm_split(void* comm, int color, int key, void** part) {
    Communicator* made = nullptr;
    const int code =
        color < 0 ? code_of("split: expected a color of at least 0, got " + std::to_string(color))
                  : of(comm).split(color, key, &made);
    *part = made;
    if (code != kSuccess) std::fprintf(stderr, "unisono.mlx: %s\n", text_of(code).c_str());
    return code;
}

// MLX frees a group whose collectives are still in the queue of a stream, so groups stay.
EXPORTED int MPI_Comm_free(void** comm) {
    *comm = nullptr;
    return kSuccess;
}

EXPORTED int MPI_Allreduce(const void* in, void* out, int count, const void* type, const void* op,
                           void* comm) {
    const auto& element = *static_cast<const Type*>(type);
    const auto& combines = *static_cast<const Operator*>(op);
    if (in == reinterpret_cast<const void*>(uintptr_t{1})) in = out;  // MPI_IN_PLACE
    if (combines.any_type) {
        const Reduction reduction{element.dtype, *combines.any_type};
        return done(collective(comm, UNISONO_ALL_REDUCE, reduction, in, out, count));
    }
    if (combines.known)
        return done(collective(comm, UNISONO_ALL_REDUCE, *combines.known, in, out, count));
    return done(combine_gathered(comm, element, combines.function, in, out, count));
}

EXPORTED int MPI_Allgather(const void* in, int count, const void* type, void* out, int, const void*,
                           void* comm) {
    const Reduction none{static_cast<const Type*>(type)->dtype, UNISONO_SUM};
    return done(collective(comm, UNISONO_ALL_GATHER, none, in, out, count));
}

EXPORTED int MPI_Send(const void* data, int count, const void* type, int to, int tag, void* comm) {
    return done(of(comm).send(message_of(data, count, type, to, tag)));
}

EXPORTED int MPI_Recv(void* data, int count, const void* type, int from, int tag, void* comm,
                      void*) {
    return done(of(comm).receive(message_of(data, count, type, from, tag)));
}

// MLX makes float16 and bfloat16, in this order, of two bytes.
EXPORTED int MPI_Type_contiguous(int count, const void* type, const void** made) {
    static std::atomic<int> number{0};
    if (count != 2 || type != &ompi_mpi_uint8_t)
        end_process(
            "expected MLX's types of two bytes, got another one: this version of MLX is unknown");
    *made = kept(Type{number++ ? UNISONO_BFLOAT16 : UNISONO_FLOAT16, 2});
    return kSuccess;
}

EXPORTED int MPI_Type_commit(void**) {
    return kSuccess;
}

EXPORTED int MPI_Op_create(UserFunction function, int, const void** made) {
    *made = kept(Operator{function, recognised(function), std::nullopt});
    return kSuccess;
}

// ---- functions that only other programs of this process call: MLX makes this library's names
// visible to them

#define REFUSED(name)                                                                        \
    EXPORTED int name() {                                                                    \
        end_process(                                                                         \
            #name                                                                            \
            " is not served: MLX's collectives of this process run on Unisono, so no other " \
            "library, such as mpi4py, can use MPI in it");                                   \
    }
REFUSED(MPI_Init_thread)
REFUSED(MPI_Initialized)

}  // namespace unisono::mpi
