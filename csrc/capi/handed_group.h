// A group that its owner, a program in Python, hands over to C; see unisono.h.
#pragma once

#include <memory>

#include "capi/unisono.h"
#include "execution/group.h"
#include "execution/prepared_call.h"

namespace unisono::capi {

// What C asks of the owner of a group. Any thread may call these functions. They throw Error.
class Owner {
  public:
    Owner() = default;
    Owner(const Owner&) = delete;
    Owner& operator=(const Owner&) = delete;
    virtual ~Owner() = default;

    // Chooses the algorithm of a collective.
    [[nodiscard]] virtual std::shared_ptr<const Prepared> prepare(
        const unisono_collective& collective) = 0;
    // Returns this rank's part of the group, which the caller owns, or nullptr. Collective.
    [[nodiscard]] virtual unisono_group* split(int32_t color, int32_t key) = 0;
    // Begins to connect this rank to a rank of another host, or to all with p2p::kAnySource.
    virtual void reach(int32_t peer) = 0;
};

// Returns a group for C, which lives until its last `release`. The caller is its first owner.
[[nodiscard]] unisono_group* hand_over(std::shared_ptr<Group> group, std::unique_ptr<Owner> owner);

}  // namespace unisono::capi
