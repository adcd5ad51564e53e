// The functions of MPI that JAX's collectives call, with the types of MPItrampoline's ABI. XLA
// makes them from any of its threads.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "mpi/comm_world.h"
#include "mpi/communicator.h"
#include "mpi/names.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace unisono::mpi {
namespace {

std::string world_error = "import unisono.jax before jax";

struct Message {
    Communicator* comm;
    unisono_request* request;
};

std::optional<uint32_t> type_of(MPIABI_Datatype type) {
    const uintptr_t number = type - kFirstType;
    return number <= UNISONO_COMPLEX128 ? std::optional(static_cast<uint32_t>(number))
                                        : std::nullopt;
}

std::optional<uint32_t> reduction_of(MPIABI_Op op) {
    const uintptr_t number = op - kFirstReduction;
    return number <= UNISONO_MAX ? std::optional(static_cast<uint32_t>(number)) : std::nullopt;
}

Communicator* of(MPIABI_Comm comm) noexcept {
    return comm == kWorld ? world() : reinterpret_cast<Communicator*>(comm);
}

// Calls a function of a communicator, whose exceptions and missing communicator become codes.
template <class Action>
int on(MPIABI_Comm comm, Action&& action) noexcept {
    try {
        if (Communicator* const found = of(comm)) return action(*found);
        return code_of(world_error);
    } catch (const std::exception& error) {
        return code_of(error.what());
    }
}

int run(MPIABI_Comm comm, uint32_t op, const void* in, void* out, int count, MPIABI_Datatype type,
        std::optional<MPIABI_Op> reduction = std::nullopt) noexcept {
    return on(comm, [&](Communicator& found) {
        const auto dtype = type_of(type);
        const auto kind = reduction ? reduction_of(*reduction) : UNISONO_SUM;
        if (!dtype || !kind)
            return code_of("unisono serves MPI's types and reductions of JAX only");
        if (count < 0) return code_of("expected at most 2^31 - 1 elements, MPI's limit, got more");
        return found.run({op, *dtype, *kind, -1, static_cast<uint64_t>(count)}, in, out);
    });
}

std::optional<unisono_message> message_of(void* data, int count, MPIABI_Datatype type, int peer,
                                          int tag) {
    const auto dtype = type_of(type);
    if (!dtype || count < 0) return std::nullopt;
    return unisono_message{data, static_cast<uint64_t>(count), *dtype, peer,
                           static_cast<uint64_t>(tag)};
}

int bad_message() {
    return code_of("expected a message of at most 2^31 - 1 elements of MPI's types of JAX");
}

int begin(void* data, int count, MPIABI_Datatype type, int peer, int tag, MPIABI_Comm comm,
          bool sends, MPIABI_Request* request) noexcept {
    return on(comm, [&](Communicator& found) {
        const auto message = message_of(data, count, type, peer, tag);
        if (!message) return bad_message();
        unisono_request* begun = nullptr;
        if (const int code = found.begin(*message, sends, &begun)) return code;
        *request = reinterpret_cast<uintptr_t>(new Message{&found, begun});
        return kSuccess;
    });
}

}  // namespace

// ---- functions of MPI

EXPORTED int MPIABI_Init_thread(int*, char***, int, int* provided) {
    *provided = kMultiple;
    Communicator* const joined = join_world(world_error);
    set_world(joined ? joined : new Communicator(world_error));
    return joined ? kSuccess : code_of(world_error);
}

EXPORTED int MPIABI_Initialized(int* flag) {
    *flag = world() != nullptr;
    return kSuccess;
}

EXPORTED int MPIABI_Is_thread_main(int* flag) {
    *flag = 1;  // any thread may call
    return kSuccess;
}

EXPORTED int MPIABI_Comm_rank(MPIABI_Comm comm, int* rank) {
    return on(comm, [&](Communicator& found) { return *rank = found.rank(), kSuccess; });
}

EXPORTED int MPIABI_Comm_size(MPIABI_Comm comm, int* size) {
    return on(comm, [&](Communicator& found) { return *size = found.ranks(), kSuccess; });
}

EXPORTED int MPIABI_Comm_split(MPIABI_Comm comm, int color, int key, MPIABI_Comm* part) {
    *part = kNullComm;
    return on(comm, [&](Communicator& found) {
        char text[kMostText] = "";
        Communicator* made = nullptr;
        int code = kSuccess;
        if (program().check && program().check(text, sizeof text)) {
            made = new Communicator(std::string(text));
            code = code_of(text);
        } else {
            code = found.split(color, key, &made);
        }
        *part = reinterpret_cast<uintptr_t>(made);
        return code;
    });
}

EXPORTED int MPIABI_Comm_free(MPIABI_Comm* comm) {
    // XLA frees communicators after MPI_Finalize, when Python has ended
    if (*comm != kWorld && !has_ended()) delete of(*comm);
    *comm = kNullComm;
    return kSuccess;
}

EXPORTED int MPIABI_Allreduce(const void* in, void* out, int count, MPIABI_Datatype type,
                              MPIABI_Op op, MPIABI_Comm comm) {
    return run(comm, UNISONO_ALL_REDUCE, in, out, count, type, op);
}

// All counts of JAX are equal.
EXPORTED int MPIABI_Reduce_scatter(const void* in, void* out, const int* counts,
                                   MPIABI_Datatype type, MPIABI_Op op, MPIABI_Comm comm) {
    return run(comm, UNISONO_REDUCE_SCATTER, in, out, counts[0], type, op);
}

EXPORTED int MPIABI_Allgather(const void* in, int count, MPIABI_Datatype type, void* out, int,
                              MPIABI_Datatype, MPIABI_Comm comm) {
    return run(comm, UNISONO_ALL_GATHER, in, out, count, type);
}

EXPORTED int MPIABI_Sendrecv(const void* out, int out_count, MPIABI_Datatype out_type, int to,
                             int out_tag, void* in, int in_count, MPIABI_Datatype in_type, int from,
                             int in_tag, MPIABI_Comm comm, MPIABI_Status*) {
    return on(comm, [&](Communicator& found) {
        const auto sent = message_of(const_cast<void*>(out), out_count, out_type, to, out_tag);
        const auto received = message_of(in, in_count, in_type, from, in_tag);
        return sent && received ? found.exchange(*sent, *received) : bad_message();
    });
}

EXPORTED int MPIABI_Isend(const void* data, int count, MPIABI_Datatype type, int to, int tag,
                          MPIABI_Comm comm, MPIABI_Request* request) {
    return begin(const_cast<void*>(data), count, type, to, tag, comm, true, request);
}

EXPORTED int MPIABI_Irecv(void* data, int count, MPIABI_Datatype type, int from, int tag,
                          MPIABI_Comm comm, MPIABI_Request* request) {
    return begin(data, count, type, from, tag, comm, false, request);
}

EXPORTED int MPIABI_Wait(MPIABI_Request* request, MPIABI_Status*) {
    const std::unique_ptr<Message> begun(reinterpret_cast<Message*>(*request));
    *request = kNullRequest;
    return begun ? begun->comm->wait(begun->request) : kSuccess;
}

EXPORTED int MPIABI_Error_string(int code, char* text, int* length) {
    const std::string found = text_of(code);
    *length = static_cast<int>(std::min(found.size(), kMostText - 1));
    std::memcpy(text, found.data(), static_cast<size_t>(*length));
    text[*length] = 0;
    return kSuccess;
}

EXPORTED int MPIABI_Finalize() {
    set_ended();  // the group leaves with its communicator in Python
    return kSuccess;
}

EXPORTED int MPIABI_Finalized(int* flag) {
    *flag = has_ended();
    return kSuccess;
}

}  // namespace unisono::mpi
