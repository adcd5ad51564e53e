#include "bind/voted_work.h"

#include <algorithm>
#include <cstring>

#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/voted_calls.h"

namespace nb = nanobind;

namespace unisono::bind {
namespace {

Pieces one_piece(std::byte* data, uint64_t bytes) {
    Pieces pieces;
    pieces.push_back({data, bytes});
    return pieces;
}

}  // namespace

Pieces CallMemory::pieces() const {
    if (buffer) return one_piece(buffer->data(), buffer->size());
    const auto& [address, bytes] = pack.memory().front();
    return one_piece(at(address), bytes);
}

void VotedWork::submit(const Prepared& vote, const Prepared& call, double timeout_s,
                       double inline_s) {
    Dispatcher& dispatcher = group_->dispatcher();
    const Pieces own_vote = one_piece(reinterpret_cast<std::byte*>(&vote_), sizeof vote_);
    Execution first = dispatcher.or_fail([&] { return vote.bind(own_vote, own_vote); });
    Execution next =
        dispatcher.or_fail([&] { return call.bind(memory_.pieces(), memory_.pieces()); });
    const WithoutGil release;
    if (memory_.buffer) memory_.pack.gather(memory_.buffer_address());
    job_ = dispatcher.submit(std::move(first), timeout_s, inline_s,
                             continuation_of_vote(&vote_, std::move(next), &agreed_ns_));
}

void VotedWork::submit_carrying(const std::shared_ptr<const CarriedVote>& vote, bool agrees,
                                const Prepared& call, double timeout_s, double inline_s) {
    Dispatcher& dispatcher = group_->dispatcher();
    Execution execution =
        dispatcher.or_fail([&] { return call.bind(memory_.pieces(), memory_.pieces()); });
    const std::string& own = agrees ? vote->agreement : vote->objection;
    std::byte* const last = memory_.buffer->data() + memory_.buffer->size() - own.size();
    const WithoutGil release;
    memory_.pack.gather(memory_.buffer_address());
    std::memcpy(last, own.data(), own.size());
    carried_vote_ = vote;
    agreed_ns_ = steady_now_ns();
    // The callback captures no shared pointer to the vote: the vote may be a Python object, whose
    // last reference must be released with the GIL.
    const auto count = [this, last]() -> std::optional<Execution> {
        const std::string& agreement = carried_vote_->agreement;
        vote_ = std::memcmp(last, agreement.data(), agreement.size()) == 0;
        if (ran()) group_->counters().add(carried_vote_->volume);
        return std::nullopt;
    };
    job_ = dispatcher.submit(std::move(execution), timeout_s, inline_s, count);
}

void VotedWork::wait(nb::handle self, std::optional<double> timeout_s) {
    const double limit_s = timeout_s ? std::max(*timeout_s, 0.0) : -1;
    bool in_time = true;
    try {
        if (job_->done() && memory_.is_small()) {
            group_->dispatcher().wait(*job_, -1, {});  // throws the error of the call
            complete();
        } else {
            const WithoutGil release;
            in_time = group_->dispatcher().wait(*job_, limit_s, python_signals());
            if (in_time) complete();
        }
    } catch (...) {
        if (job_->done()) release_from_held(self);
        throw;
    }
    if (!in_time) raise_late("the call is", *timeout_s);
    release_from_held(self);
}

// Removes this object from `held`, so that it can be freed. Preserves the current Python error,
// which a signal handler may have set.
void VotedWork::release_from_held(nb::handle self) {
    const nb::error_scope current;
    if (PySet_Discard(held_.ptr(), self.ptr()) < 0) PyErr_Clear();
}

std::optional<std::pair<int64_t, int64_t>> VotedWork::times_ns() const noexcept {
    if (!job_->done() || !ran()) return std::nullopt;
    return std::make_pair(agreed_ns_, job_->ended_ns());
}

// Copies the result to the arrays. Only the first thread that waits does so.
void VotedWork::complete() {
    if (!memory_.buffer) return;
    const std::lock_guard lock(completing_);
    if (!std::exchange(completed_, true) && ran()) memory_.pack.scatter(memory_.buffer_address());
}

}  // namespace unisono::bind
