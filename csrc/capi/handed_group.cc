#include "capi/handed_group.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "capi/requests.h"
#include "execution/overlap_rule.h"

namespace unisono::capi {

// The bytes of the input and the output of a call.
struct Sizes {
    uint64_t in, out;
};

namespace {

struct HandedGroup final : unisono_group {
    HandedGroup(std::shared_ptr<Group> shared, std::unique_ptr<Owner> owned);

    // Connects this rank to the rank of a message. Throws Error for a wrong rank.
    void reach(const unisono_message& message) {
        const auto count = static_cast<int32_t>(reached.size());
        const bool any = message.peer == p2p::kAnySource;
        if (!any && (message.peer < 0 || message.peer >= count))
            throw Error(Fault::invalid, "peer: expected a rank below " + std::to_string(count) +
                                            ", got " + std::to_string(message.peer));
        const auto peer = static_cast<size_t>(message.peer);
        if (any ? all_reached.load(std::memory_order_acquire)
                : reached[peer].load(std::memory_order_acquire))
            return;
        owner->reach(message.peer);
        if (any) {
            all_reached.store(true, std::memory_order_release);
        } else {
            reached[peer].store(true, std::memory_order_release);
        }
    }

    const std::shared_ptr<Group> group;
    const std::unique_ptr<Owner> owner;
    std::atomic<uint64_t> owners{1};
    std::vector<std::atomic<bool>> reached;  // by rank: messages need no connection first
    std::atomic<bool> all_reached{false};
};

HandedGroup& of(unisono_group* group) noexcept {
    return *static_cast<HandedGroup*>(group);
}
const HandedGroup& of(const unisono_group* group) noexcept {
    return *static_cast<const HandedGroup*>(group);
}

Sizes sizes_of(const unisono_collective& made, uint64_t ranks) {
    const auto type = static_cast<DType>(made.dtype);
    const uint64_t piece = made.count * size_of(type), whole = ranks * piece;
    switch (static_cast<OpKind>(made.op)) {
        case OpKind::reduce_scatter:
        case OpKind::scatter:
            return {whole, piece};
        case OpKind::all_gather:
        case OpKind::gather:
            return {piece, whole};
        case OpKind::all_to_all:
            return {whole, whole};
        case OpKind::barrier:
            return {0, 0};
        default:
            return {piece, piece};
    }
}

}  // namespace
}  // namespace unisono::capi

struct unisono_call {
    std::shared_ptr<unisono::Group> group;
    std::shared_ptr<const unisono::Prepared> prepared;
    unisono::OpKind op;
    bool is_root;
    unisono::capi::Sizes sizes;
};

namespace unisono::capi {
namespace {

unisono_status failed(const Error& thrown, unisono_error* error) noexcept {
    if (error) {
        const size_t length = std::min(std::strlen(thrown.what()), sizeof error->text - 1);
        std::memcpy(error->text, thrown.what(), length);
        error->text[length] = 0;
    }
    return static_cast<unisono_status>(thrown.fault());
}

// Runs a function of the interface, whose errors become a status and a text.
template <class Action>
unisono_status guarded(unisono_error* error, Action&& action) noexcept {
    try {
        return action();
    } catch (const std::exception& thrown) {
        return failed(error_of(thrown), error);
    }
}

double checked_timeout(double timeout_s) {
    if (!(timeout_s > 0))
        throw Error(Fault::invalid,
                    "timeout_s: expected more than 0 seconds, got " + std::to_string(timeout_s));
    return timeout_s;
}

template <class T>
T& given(T* pointer, const char* name) {
    if (!pointer) throw Error(Fault::invalid, std::string(name) + ": expected a pointer, got NULL");
    return *pointer;
}

// Replaces the memory that an operation does not use on this rank by the memory that it uses.
std::pair<std::byte*, std::byte*> used_memory(const unisono_call& call, const void* in, void* out) {
    auto* source = static_cast<std::byte*>(const_cast<void*>(in));  // never written as an input
    auto* target = static_cast<std::byte*>(out);
    switch (call.op) {
        case OpKind::broadcast:
            return call.is_root ? std::pair(source, source) : std::pair(target, target);
        case OpKind::scatter:
            return {call.is_root ? source : target, target};
        case OpKind::gather:
        case OpKind::reduce:
            return {source, call.is_root ? target : source};
        default:
            return {source, target};
    }
}

Execution bound(const unisono_call& call, const void* in, void* out) {
    const auto [source, target] = used_memory(call, in, out);
    const auto [in_bytes, out_bytes] = call.sizes;
    if ((!source && in_bytes) || (!target && out_bytes))
        throw Error(Fault::invalid, std::string(name_of(call.op)) +
                                        ": expected memory, got NULL for " +
                                        (source ? "out" : "in"));
    const Range read{reinterpret_cast<uintptr_t>(source), in_bytes};
    const Range written{reinterpret_cast<uintptr_t>(target), out_bytes};
    if (source != target && !overlap_is_safe(call.op, call.group->members().rank(), read, written))
        throw Error(Fault::invalid, std::string(name_of(call.op)) +
                                        ": in and out overlap; give memory that is apart");
    return call.group->dispatcher().or_fail([&] { return call.prepared->bind(source, target); });
}

p2p::Message checked_message(HandedGroup& group, const unisono_message* message) {
    const unisono_message& given_message = given(message, "message");
    if (given_message.dtype >= num_dtypes)
        throw Error(Fault::invalid, "dtype: expected a type of unisono.h, got " +
                                        std::to_string(given_message.dtype));
    const auto type = static_cast<DType>(given_message.dtype);
    if (!given_message.data && given_message.count)
        throw Error(Fault::invalid, "data: expected memory, got NULL");
    group.reach(given_message);
    return {static_cast<std::byte*>(given_message.data), given_message.count * size_of(type), type,
            given_message.peer, given_message.tag};
}

void require_a_rank(const unisono_message* message, bool sends) {
    const unisono_message& m = given(message, "message");
    if (sends && m.peer == p2p::kAnySource)
        throw Error(Fault::invalid, "peer: a send needs a rank, got UNISONO_ANY_SOURCE");
    if (m.tag >= p2p::kOwnTags && (sends || m.tag != p2p::kAnyTag))
        throw Error(Fault::invalid, "tag: expected a number below 2^63");
}

// Moves a message and waits for its end.
void move(HandedGroup& handed, p2p::Request& request, double timeout_s) {
    p2p::Engine& engine = handed.group->p2p();
    engine.begin(request, false);
    try {
        engine.wait(request, timeout_s, -1, {});
    } catch (...) {
        engine.end(request);
        throw;
    }
}

unisono_status begin_message(unisono_group* group, const unisono_message* message, bool sends,
                             double timeout_s, unisono_request** request, unisono_error* error) {
    return guarded(error, [&] {
        require_a_rank(message, sends);
        unisono_request*& place = given(request, "request");
        auto made =
            std::make_unique<MessageRequest>(of(group).group, checked_message(of(group), message),
                                             sends, checked_timeout(timeout_s));
        made->begin();
        place = made.release();
        return UNISONO_OK;
    });
}

unisono_status finished(unisono_request* request, double limit_s, unisono_error* error) noexcept {
    bool is_done = true;
    const unisono_status status = guarded(error, [&]() -> unisono_status {
        is_done = given(request, "request").finish(limit_s);
        return is_done ? UNISONO_OK : UNISONO_PENDING;
    });
    if (is_done) delete request;
    return status;
}

// ---- the functions of the table

uint32_t rank(const unisono_group* group) noexcept {
    return of(group).group->members().rank();
}

uint32_t ranks(const unisono_group* group) noexcept {
    return of(group).group->members().ranks();
}

void retain(unisono_group* group) noexcept {
    of(group).owners.fetch_add(1, std::memory_order_relaxed);
}

void release(unisono_group* group) noexcept {
    if (group && of(group).owners.fetch_sub(1, std::memory_order_acq_rel) == 1) delete &of(group);
}

unisono_status prepare(unisono_group* group, const unisono_collective* collective,
                       unisono_call** call, unisono_error* error) noexcept {
    return guarded(error, [&] {
        const unisono_collective& made = given(collective, "collective");
        unisono_call*& place = given(call, "call");
        HandedGroup& handed = of(group);
        auto prepared = handed.owner->prepare(made);  // refuses what is wrong
        const uint32_t own = rank(group);
        place =
            new unisono_call{handed.group, std::move(prepared), static_cast<OpKind>(made.op),
                             static_cast<int64_t>(own) == made.root, sizes_of(made, ranks(group))};
        return UNISONO_OK;
    });
}

void free_call(unisono_call* call) noexcept {
    delete call;
}

unisono_status run(unisono_call* call, const void* in, void* out, double timeout_s,
                   unisono_error* error) noexcept {
    return guarded(error, [&] {
        Execution execution = bound(given(call, "call"), in, out);
        const double limit_s = checked_timeout(timeout_s);
        call->group->dispatcher().run(std::move(execution), limit_s, kUninterrupted);
        return UNISONO_OK;
    });
}

unisono_status begin(unisono_call* call, const void* in, void* out, double timeout_s,
                     unisono_request** request, unisono_error* error) noexcept {
    return guarded(error, [&] {
        unisono_request*& place = given(request, "request");
        Execution execution = bound(given(call, "call"), in, out);
        place = new CallRequest(call->group, std::move(execution), checked_timeout(timeout_s));
        return UNISONO_OK;
    });
}

unisono_status send(unisono_group* group, const unisono_message* message, double timeout_s,
                    unisono_error* error) noexcept {
    return guarded(error, [&] {
        require_a_rank(message, true);
        p2p::Request request(checked_message(of(group), message), true);
        move(of(group), request, checked_timeout(timeout_s));
        return UNISONO_OK;
    });
}

unisono_status receive(unisono_group* group, const unisono_message* message, double timeout_s,
                       int32_t* source, uint64_t* tag, unisono_error* error) noexcept {
    return guarded(error, [&] {
        require_a_rank(message, false);
        p2p::Request request(checked_message(of(group), message), false);
        move(of(group), request, checked_timeout(timeout_s));
        if (source) *source = request.source();
        if (tag) *tag = request.tag();
        return UNISONO_OK;
    });
}

unisono_status begin_send(unisono_group* group, const unisono_message* message, double timeout_s,
                          unisono_request** request, unisono_error* error) noexcept {
    return begin_message(group, message, true, timeout_s, request, error);
}

unisono_status begin_receive(unisono_group* group, const unisono_message* message, double timeout_s,
                             unisono_request** request, unisono_error* error) noexcept {
    return begin_message(group, message, false, timeout_s, request, error);
}

unisono_status wait(unisono_request* request, double limit_s, unisono_error* error) noexcept {
    return finished(request, limit_s, error);
}

unisono_status test(unisono_request* request, unisono_error* error) noexcept {
    return finished(request, 0, error);
}

unisono_status split(unisono_group* group, int32_t color, int32_t key, unisono_group** part,
                     unisono_error* error) noexcept {
    return guarded(error, [&] {
        given(part, "part") = of(group).owner->split(color, key);
        return UNISONO_OK;
    });
}

void abort(unisono_group* group, const char* reason) noexcept {
    Group& shared = *of(group).group;
    try {
        shared.abort("rank " + std::to_string(shared.members().rank()) + ": " +
                     (reason ? reason : "aborted by the program"));
    } catch (const std::exception&) {
        shared.abort({});
    }
}

static_assert(UNISONO_PEER_LOST == static_cast<int>(Fault::peer_lost) &&
              UNISONO_UNSUPPORTED == static_cast<int>(Fault::unsupported) &&
              UNISONO_EXSCAN == static_cast<int>(OpKind::exscan) &&
              UNISONO_FLOAT8_E5M2 == static_cast<int>(DType::float8_e5m2) &&
              UNISONO_LXOR == static_cast<int>(ReduceOp::lxor) && UNISONO_ANY_TAG == p2p::kAnyTag &&
              UNISONO_ANY_SOURCE == p2p::kAnySource);

constexpr unisono_api kApi{sizeof(unisono_api),
                           UNISONO_VERSION,
                           rank,
                           ranks,
                           retain,
                           release,
                           prepare,
                           free_call,
                           run,
                           begin,
                           send,
                           receive,
                           begin_send,
                           begin_receive,
                           wait,
                           test,
                           split,
                           abort};

HandedGroup::HandedGroup(std::shared_ptr<Group> shared, std::unique_ptr<Owner> owned)
    : unisono_group{&kApi},
      group(std::move(shared)),
      owner(std::move(owned)),
      reached(group->members().ranks()) {
    for (const uint32_t here : group->view().here()) reached[here] = true;
    all_reached = group->view().here().size() == reached.size();
}

}  // namespace

unisono_group* hand_over(std::shared_ptr<Group> group, std::unique_ptr<Owner> owner) {
    return new HandedGroup(std::move(group), std::move(owner));
}

}  // namespace unisono::capi
