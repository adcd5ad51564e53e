// Calls that run only if a preceding vote (a small reduction) finds that all ranks are ready.
#pragma once

#include <cstdint>
#include <optional>

#include "execution/dispatcher.h"
#include "execution/executor.h"

namespace unisono::bind {

// Returns the continuation of the vote. It runs `next` if the result of the vote, at `vote`, is not
// 0, which means that all ranks are ready. If `agreed_ns` is not null, it receives the time at
// which the vote ended.
[[nodiscard]] Continuation continuation_of_vote(const int64_t* vote, std::optional<Execution> next,
                                                int64_t* agreed_ns = nullptr);

}  // namespace unisono::bind
