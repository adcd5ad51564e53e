// Calls that follow a vote of all ranks.
#pragma once

#include <cstdint>
#include <optional>

#include "execution/dispatcher.h"
#include "execution/executor.h"

namespace unisono::bind {

// Returns a continuation that continues with `next` if the reduced vote at `vote` is not 0. It
// stores the time of the agreement, if `agreed_ns` is not null.
[[nodiscard]] Continuation continuation_of_vote(const int64_t* vote, std::optional<Execution> next,
                                                int64_t* agreed_ns = nullptr);

}  // namespace unisono::bind
