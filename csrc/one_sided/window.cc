#include "one_sided/window.h"

#include <cstring>
#include <string>

#include "core/call.h"
#include "kernels/kernels.h"

namespace unisono {
namespace {

constexpr uint64_t kWordsOfLine = kLine / sizeof(uint64_t);

std::string of(uint64_t count, const char* unit) {
    return std::to_string(count) + " " + unit + (count == 1 ? "" : "s");
}

}  // namespace

Window::Window(View& view, Membership& members, Waiter waiter, SharedHeap& heap,
               OperationCounters& counters, const std::vector<Part>& parts, uint64_t element_bytes)
    : view_(view),
      members_(members),
      waiter_(waiter),
      stores_(static_cast<uint32_t>(view.here().size())),
      heap_(heap),
      counters_(counters),
      element_bytes_(element_bytes),
      taken_(parts.size()) {
    members.require_healthy();
    if (parts.size() != view.ranks() || element_bytes == 0)
        throw Error(Fault::invalid, "window: expected the arrays of " + of(view.ranks(), "rank") +
                                        ", got " + std::to_string(parts.size()));
    const uint64_t signal_bytes = Window::signal_bytes(view.ranks());
    for (uint32_t rank = 0; rank < parts.size(); ++rank) {
        const Part& part = parts[rank];
        std::byte* const signals = heap.at(rank, part.signals, signal_bytes);
        places_.push_back({heap.at(rank, part.array, part.bytes), part.bytes,
                           reinterpret_cast<std::atomic<uint64_t>*>(signals)});
    }
    const Part& own = parts[view.rank()];
    own_array_ = {own.array, own.bytes};
    own_signals_ = {own.signals, signal_bytes};
    heap.expose(own_array_);
    heap.expose(own_signals_);
}

Window::~Window() {
    if (members_.in_child()) return;
    if (members_.failed()) heap_.detach_exposed();
    heap_.conceal(own_array_);
    heap_.conceal(own_signals_);
}

void Window::put(uint32_t rank, uint64_t at, const std::byte* from, uint64_t bytes) {
    std::byte* const to = memory_of(rank, at, bytes, "put");
    if (rank == view_.rank()) {
        std::memmove(to, from, bytes);  // the program may copy inside of its own array
    } else {
        kernels::copy(to, from, bytes, store_for(bytes));
        counters_.add_from_any_thread({kPutRow, 1, bytes, 0});
    }
}

void Window::get(uint32_t rank, uint64_t at, std::byte* to, uint64_t bytes) {
    const std::byte* const from = memory_of(rank, at, bytes, "get");
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

void Window::signal(uint32_t rank) {
    require_rank(rank, "signal");
    require_present(rank, "signal");
    word(rank, view_.rank()).fetch_add(1, std::memory_order_release);
    ring(view_.own().doorbell, view_.fence());
    counters_.add_from_any_thread({kSignalRow, 1, 0, 0});
}

void Window::wait(uint32_t rank, uint64_t count, double timeout_s, const Interrupted& interrupted) {
    require_rank(rank, "wait");
    require_healthy();
    const uint64_t target = taken_[rank].fetch_add(count, std::memory_order_relaxed) + count;
    const std::atomic<uint64_t>& signals = word(view_.rank(), rank);
    const auto ready = [&] { return signals.load(std::memory_order_acquire) >= target; };
    if (!ready()) {
        Doorbell& doorbell = view_.control(rank).doorbell;
        Deadline deadline(timeout_s);
        const auto inspect = [&] {
            members_.require_healthy();
            if (view_.has_left(rank) && !ready())
                members_.fail(Fault::peer_lost,
                              "rank " + std::to_string(rank) + " left the group while rank " +
                                  std::to_string(view_.rank()) + " waited for its signal");
        };
        const auto late = [&] { return late_text(rank, target, timeout_s); };
        try {
            waiter_.wait(doorbell, ready, inspect, late, counters_.waited_ns(kWaitRow), deadline,
                         interrupted);
        } catch (...) {
            taken_[rank].fetch_sub(count, std::memory_order_relaxed);
            heap_.detach_exposed();
            throw;
        }
    }
    counters_.add_from_any_thread({kWaitRow, 1, 0, 0});
}

uint64_t Window::arrived(uint32_t rank) const {
    require_rank(rank, "signals");
    require_healthy();
    const uint64_t signals = word(view_.rank(), rank).load(std::memory_order_acquire);
    const uint64_t taken = taken_[rank].load(std::memory_order_relaxed);
    return signals > taken ? signals - taken : 0;  // a wait that has not ended has taken more
}

void Window::fence() {
    require_healthy();
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

std::byte* Window::memory_of(uint32_t rank, uint64_t at, uint64_t bytes, const char* what) const {
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
    return place.array + at;
}

kernels::Store Window::store_for(uint64_t bytes) const noexcept {
    return stores_.choose(StorePolicy::adaptive, {bytes, false}, false).out;
}

// Before it throws, the group's arrays are detached: a peer that was stopped may go on and write.
void Window::require_healthy() const {
    try {
        members_.require_healthy();
    } catch (const Error&) {
        if (!members_.in_child()) heap_.detach_exposed();
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

// Returns the word at rank `at` in which rank `from` counts its signals.
std::atomic<uint64_t>& Window::word(uint32_t at, uint32_t from) const noexcept {
    return places_[at].signals[from * kWordsOfLine];
}

std::string Window::late_text(uint32_t rank, uint64_t target, double timeout_s) const {
    const uint64_t arrived = word(view_.rank(), rank).load(std::memory_order_relaxed);
    return "wait for signal " + std::to_string(target) + " of rank " + std::to_string(rank) + ": " +
           timeout_text(view_.rank(), timeout_s) + ": " + of(arrived, "signal") +
           " arrived; rank " + std::to_string(rank) + ": " + activity_text(view_.control(rank));
}

}  // namespace unisono
