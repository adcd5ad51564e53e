// The handle of a voted call, and the memory of the call.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/pack.h"
#include "execution/group.h"
#include "execution/prepared_call.h"

namespace unisono::bind {

// The memory of one call. Several arrays are copied into one buffer, and copied back at the end. A
// single array is copied only if its call carries the vote.
struct CallMemory {
    Pack pack;
    std::shared_ptr<std::vector<std::byte>> buffer;  // null if the call uses the array's memory

    // Returns true if the copies between arrays and buffer take less time than a release of the
    // GIL.
    [[nodiscard]] bool is_small() const noexcept { return !buffer || buffer->size() <= kSmall; }
    [[nodiscard]] Address buffer_address() const noexcept {
        return reinterpret_cast<Address>(buffer->data());
    }
    [[nodiscard]] Pieces pieces() const;

    static constexpr size_t kSmall = 2048;  // bytes
};

// A vote that is one more element after the data of the same call. The reduction of agreements is
// the agreement. If any rank votes with the objection, the result differs from the agreement.
struct CarriedVote {
    std::string agreement, objection;  // the bytes of one element
    CallVolume volume;                 // added to the counters if all ranks agree
};

// The handle of one call. Until the call has ended, `held` keeps this object and its memory alive.
class VotedWork {
  public:
    VotedWork(std::shared_ptr<Group> group, CallMemory memory, nanobind::set held)
        : group_(std::move(group)), memory_(std::move(memory)), held_(std::move(held)) {}

    // Begins the call `vote`, and then `call` if all ranks agree.
    void submit(const Prepared& vote, const Prepared& call, double timeout_s, double inline_s);
    // Begins a call whose last element is the vote: the agreement if `agrees`, else the objection.
    void submit_carrying(const std::shared_ptr<const CarriedVote>& vote, bool agrees,
                         const Prepared& call, double timeout_s, double inline_s);
    // Keeps the storages of the arrays while the call is pending.
    void keep_storages(Arrays& arrays) { memory_.pack.keep_storages(arrays); }
    // Waits for the end, and copies the result to the arrays. Throws Python's TimeoutError, and the
    // error of the call. `self` is the Python object of this handle.
    void wait(nanobind::handle self, std::optional<double> timeout_s);

    [[nodiscard]] bool done() const noexcept { return job_->done(); }
    // Returns true if all ranks were ready. Requires that the call has ended.
    [[nodiscard]] bool ran() const noexcept { return vote_ != 0; }
    // Returns the times at which the data began to move, and at which the call ended. The data
    // begin to move when all ranks have agreed, or when the call begins if it carries the vote.
    // Returns nothing before the end, and for a void call.
    [[nodiscard]] std::optional<std::pair<int64_t, int64_t>> times_ns() const noexcept;

  private:
    void complete();
    void release_from_held(nanobind::handle self);

    std::shared_ptr<Group> group_;
    CallMemory memory_;
    nanobind::set held_;
    int64_t vote_ = 1;
    int64_t agreed_ns_ = 0;
    std::shared_ptr<const CarriedVote> carried_vote_;
    std::shared_ptr<Job> job_;
    std::mutex completing_;
    bool completed_ = false;
};

}  // namespace unisono::bind
