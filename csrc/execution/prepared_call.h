// A prepared call: all arguments of a call except its memory. It is made once and run many times.
#pragma once

#include <memory>

#include "execution/executor.h"

namespace unisono {

struct Prepared {
    std::shared_ptr<const Plan> plan;
    CallArgs args;
    uint64_t hash;
    uint64_t block_bytes;
    uint64_t piece_bytes;    // Bytes of each piece, if all pieces are equal and contiguous.
    uint64_t longest_bytes;  // Bytes of the longest piece of all ranks.
    StorePolicy policy;
    uint32_t lead = 0;  // blocks by which the first round runs ahead; see Execution::lead
    CallVolume volume{};
    std::shared_ptr<const HeapForm> heap_form{};

    // Makes a call on contiguous pieces that begin at `in` and `out`.
    [[nodiscard]] Execution bind(std::byte* in, std::byte* out) const {
        Execution execution = blank();
        for (uint32_t p = 0; p < plan->pieces_in; ++p)
            execution.in.push_back({in + p * piece_bytes, piece_bytes});
        for (uint32_t p = 0; p < plan->pieces_out; ++p)
            execution.out.push_back({out + p * piece_bytes, piece_bytes});
        return execution;
    }

    // Makes a call on separate pieces of any lengths.
    [[nodiscard]] Execution bind(Pieces in, Pieces out) const {
        Execution execution = blank();
        execution.in = std::move(in);
        execution.out = std::move(out);
        return execution;
    }

  private:
    [[nodiscard]] Execution blank() const {
        Execution execution;
        execution.plan = plan;
        execution.args = args;
        execution.hash = hash;
        execution.block_bytes = block_bytes;
        execution.longest_bytes = longest_bytes;
        execution.policy = policy;
        execution.lead = lead;
        execution.volume = volume;
        execution.heap_form = heap_form;
        return execution;
    }
};

}  // namespace unisono
