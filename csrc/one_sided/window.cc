#include "one_sided/window.h"

#include <cstring>
#include <string>

#include "core/call.h"
#include "kernels/kernels.h"

namespace unisono {
namespace {

std::string of(uint64_t count, const char* unit) {
    return std::to_string(count) + " " + unit + (count == 1 ? "" : "s");
}

}  // namespace

OwnPart::OwnPart(Group& group, const HeapRange& array, const HeapRange& signals)
    : group_(group), array_(array), signals_(signals) {
    SharedHeap& heap = group.heap();
    const uint32_t rank = group.view().rank();
    std::byte* const words = heap.at(rank, signals.offset, signals.bytes);
    heap.expose(array);
    heap.expose(signals);
    number_ = group.p2p().serve({heap.at(rank, array.offset, array.bytes), array.bytes,
                                 reinterpret_cast<std::atomic<uint64_t>*>(words)},
                                true);
}

OwnPart::~OwnPart() {
    if (group_.members().in_child()) return;
    group_.p2p().stop_serving(number_);
    if (group_.members().failed()) group_.heap().detach_exposed();
    group_.heap().conceal(array_);
    group_.heap().conceal(signals_);
}

Window::Window(Group& group, const std::vector<Part>& parts, uint64_t element_bytes)
    : group_(group),
      view_(group.view()),
      members_(group.members()),
      waiter_(group.waiter()),
      stores_(static_cast<uint32_t>(view_.here().size())),
      heap_(group.heap()),
      counters_(group.counters()),
      element_bytes_(element_bytes),
      taken_(parts.size()),
      sent_(parts.size()),
      confirmed_(parts.size()) {
    members_.require_healthy();
    if (parts.size() != view_.ranks() || element_bytes == 0)
        throw Error(Fault::invalid, "window: expected the arrays of " + of(view_.ranks(), "rank") +
                                        ", got " + std::to_string(parts.size()));
    const uint64_t signal_bytes = Window::signal_bytes(view_.ranks());
    for (uint32_t rank = 0; rank < parts.size(); ++rank) {
        const Part& part = parts[rank];
        Place place{nullptr, part.bytes, nullptr, part.number};
        if (!is_away(rank)) {
            place.array = heap_.at(rank, part.array, part.bytes);
            place.signals = reinterpret_cast<std::atomic<uint64_t>*>(
                heap_.at(rank, part.signals, signal_bytes));
        }
        places_.push_back(place);
    }
}

void Window::put(uint32_t rank, uint64_t at, const std::byte* from, uint64_t bytes,
                 RemoteWait& wait) {
    check_access(rank, at, bytes, "put");
    if (is_away(rank)) {
        p2p::Request request({const_cast<std::byte*>(from), bytes, DType::uint8,
                              static_cast<int32_t>(rank), 0, true},
                             true);
        access_away(request, at, wait);
        sent_[rank].fetch_add(1, std::memory_order_relaxed);
        counters_.add_from_any_thread({kPutRow, 1, bytes, 0});
        return;
    }
    std::byte* const to = places_[rank].array + at;
    if (rank == view_.rank()) {
        std::memmove(to, from, bytes);  // the program may copy inside of its own array
    } else {
        kernels::copy(to, from, bytes, store_for(bytes));
        counters_.add_from_any_thread({kPutRow, 1, bytes, 0});
    }
}

void Window::get(uint32_t rank, uint64_t at, std::byte* to, uint64_t bytes, RemoteWait& wait) {
    check_access(rank, at, bytes, "get");
    if (is_away(rank)) {
        p2p::Request request({to, bytes, DType::uint8, static_cast<int32_t>(rank), 0, true}, false);
        access_away(request, at, wait);
        counters_.add_from_any_thread({kGetRow, 1, 0, bytes});
        return;
    }
    const std::byte* const from = places_[rank].array + at;
    if (rank == view_.rank()) {
        std::memmove(to, from, bytes);
        return;
    }
    kernels::copy(to, from, bytes, store_for(bytes));
    // The owner of a failed group detaches its array, so the bytes may be older than its own.
    std::atomic_thread_fence(std::memory_order_acquire);
    require_healthy();
    counters_.add_from_any_thread({kGetRow, 1, 0, bytes});
}

void Window::access_away(p2p::Request& request, uint64_t at, RemoteWait& wait) {
    const auto rank = static_cast<size_t>(request.message().peer);
    try {
        group_.p2p().access(request, places_[rank].number, at, wait.timeout_s, wait.interrupted);
    } catch (...) {
        wait.needs_memory = request.needs_memory();
        detach_after_failure();
        throw;
    }
}

void Window::signal(uint32_t rank) {
    require_rank(rank, "signal");
    require_present(rank, "signal");
    if (is_away(rank)) {
        try {
            group_.p2p().signal(rank, places_[rank].number);
        } catch (...) {
            detach_after_failure();
            throw;
        }
        sent_[rank].fetch_add(1, std::memory_order_relaxed);
    } else {
        p2p::signal_word(places_[rank].signals, view_.rank())
            .fetch_add(1, std::memory_order_release);
        ring(view_.own().doorbell, view_.fence());
    }
    counters_.add_from_any_thread({kSignalRow, 1, 0, 0});
}

void Window::wait(uint32_t rank, uint64_t count, double timeout_s, const Interrupted& interrupted) {
    require_rank(rank, "wait");
    require_healthy();
    const uint64_t target = taken_[rank].fetch_add(count, std::memory_order_relaxed) + count;
    if (!has_arrived(rank, target)) {
        try {
            if (is_away(rank)) {
                group_.p2p().await_signals(
                    rank, [&] { return has_arrived(rank, target); },
                    [&] { return late_text(rank, target, timeout_s); }, timeout_s, interrupted);
            } else {
                wait_here(rank, target, timeout_s, interrupted);
            }
        } catch (...) {
            taken_[rank].fetch_sub(count, std::memory_order_relaxed);
            detach_after_failure();
            throw;
        }
    }
    counters_.add_from_any_thread({kWaitRow, 1, 0, 0});
}

void Window::wait_here(uint32_t rank, uint64_t target, double timeout_s,
                       const Interrupted& interrupted) {
    Doorbell& doorbell = view_.control(rank).doorbell;
    Deadline deadline(timeout_s);
    const auto ready = [&] { return has_arrived(rank, target); };
    const auto inspect = [&] {
        members_.require_healthy();
        if (view_.has_left(rank) && !ready())
            members_.fail(Fault::peer_lost,
                          "rank " + std::to_string(rank) + " left the group while rank " +
                              std::to_string(view_.rank()) + " waited for its signal");
    };
    const auto late = [&] { return late_text(rank, target, timeout_s); };
    waiter_.wait(doorbell, ready, inspect, late, counters_.waited_ns(kWaitRow), deadline,
                 interrupted);
}

uint64_t Window::arrived(uint32_t rank) const {
    require_rank(rank, "signals");
    require_healthy();
    const uint64_t signals = own_word(rank).load(std::memory_order_acquire);
    const uint64_t taken = taken_[rank].load(std::memory_order_relaxed);
    return signals > taken ? signals - taken : 0;  // a wait that has not ended has taken more
}

// A get of no bytes follows all frames that this rank has sent, so its answer tells that the peer
// has taken them. Another thread may fence at the same time: its answer counts only once it has
// arrived.
void Window::fence(RemoteWait& wait) {
    require_healthy();
    std::atomic_thread_fence(std::memory_order_seq_cst);
    for (const uint32_t rank : view_.away()) {
        const uint64_t sent = sent_[rank].load(std::memory_order_relaxed);
        std::atomic<uint64_t>& confirmed = confirmed_[rank];
        uint64_t known = confirmed.load(std::memory_order_relaxed);
        if (known >= sent) continue;
        p2p::Request request({nullptr, 0, DType::uint8, static_cast<int32_t>(rank), 0, true},
                             false);
        access_away(request, 0, wait);
        while (known < sent && !confirmed.compare_exchange_weak(known, sent)) {
        }
    }
}

void Window::check_access(uint32_t rank, uint64_t at, uint64_t bytes, const char* what) const {
    require_rank(rank, what);
    require_present(rank, what);
    const Place& place = places_[rank];
    if (at > place.bytes || bytes > place.bytes - at) {
        const uint64_t first = at / element_bytes_, count = bytes / element_bytes_;
        throw Error(Fault::invalid, std::string(what) + ": " + of(count, "element") +
                                        " from element " + std::to_string(first) +
                                        " on are outside of the array of rank " +
                                        std::to_string(rank) + ", which has " +
                                        of(place.bytes / element_bytes_, "element"));
    }
}

kernels::Store Window::store_for(uint64_t bytes) const noexcept {
    return stores_.choose(StorePolicy::adaptive, {.bytes = bytes}, false).out;
}

// An interrupted call does not fail the group, so its arrays stay shared.
void Window::detach_after_failure() const noexcept {
    if (!members_.in_child() && (members_.failed() || members_.closed())) heap_.detach_exposed();
}

// Before it throws, the group's arrays are detached: a peer that was stopped may go on and write.
void Window::require_healthy() const {
    try {
        members_.require_healthy();
    } catch (const Error&) {
        detach_after_failure();
        throw;
    }
}

// A rank that has left may use the memory of its array for something else.
void Window::require_present(uint32_t rank, const char* what) const {
    require_healthy();
    if (view_.has_left(rank))
        members_.fail(Fault::peer_lost, std::string(what) + ": rank " + std::to_string(rank) +
                                            " left the group before this call of rank " +
                                            std::to_string(view_.rank()));
}

void Window::require_rank(uint32_t rank, const char* what) const {
    if (rank >= places_.size())
        throw Error(Fault::invalid, std::string(what) + ": rank " + std::to_string(rank) +
                                        " is not one of the " + of(places_.size(), "rank") +
                                        " of this group");
}

std::string Window::late_text(uint32_t rank, uint64_t target, double timeout_s) const {
    const uint64_t arrived = own_word(rank).load(std::memory_order_relaxed);
    return "wait for signal " + std::to_string(target) + " of rank " + std::to_string(rank) + ": " +
           timeout_text(view_.rank(), timeout_s) + ": " + of(arrived, "signal") +
           " arrived; rank " + std::to_string(rank) + ": " + activity_text(view_.control(rank));
}

}  // namespace unisono
