// Interprets plans over the blocks of a message, on the shared memory of one group.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "call.h"
#include "kernels/kernels.h"
#include "plan.h"
#include "tuner.h"
#include "waiter.h"

namespace unisono {

struct Piece {
    std::byte* data;
    uint64_t bytes;
};

// One call in flight: a plan, its arguments, and how far it has come. Resumable.
struct Execution {
    std::shared_ptr<const Plan> plan;
    CallArgs args;
    uint64_t hash;  // fingerprint(args)
    uint64_t block_bytes;
    uint64_t longest_bytes;  // of all pieces of all ranks: they must count the same blocks
    std::vector<Piece> in, out;
    StorePolicy policy = StorePolicy::adaptive;

    Stores stores;  // of the current block
    StorePlan store_plan;

    uint64_t seq = 0;  // 0: not begun
    uint64_t blocks = 0, block = 0;
    size_t record = 0;
    uint32_t verified = 0;   // peers whose header has been seen to agree
    bool announced = false;  // own header is visible
};

class Executor {
  public:
    Executor(Segment& segment, Membership& members, Waiter waiter);

    // Runs until the call is complete (true), or until it would have to wait longer than
    // `limit_s` (false; 0 = as long as the deadline allows). Throws Error.
    bool advance(Execution& call, Deadline& deadline, const Interrupted& interrupted,
                 double limit_s);
    // A call that has begun will not be completed: the others learn it, for they would wait in
    // vain.
    void abandon(const Execution& call, const char* why);

    [[nodiscard]] uint64_t calls() const noexcept { return calls_.load(std::memory_order_relaxed); }

  private:
    struct Wait {
        Execution& call;
        Deadline& deadline;
        const Interrupted& interrupted;
        double limit_s;
    };

    void begin(Execution& call);
    bool carry_on(Wait wait);
    void announce(Execution& call) noexcept;
    bool reuse_slots(Wait& wait);
    bool run_block(Wait& wait);
    bool wait_progress(Wait& wait, uint32_t peer, uint64_t target);
    bool verify_all(Wait& wait);
    template <class Ready>
    bool wait_for(Wait& wait, uint32_t peer, Ready ready);
    void inspect(const Execution& call, uint32_t peer);
    [[noreturn]] void mismatch(const Execution& call);
    [[nodiscard]] std::string late(const Execution& call) const;

    void copy(const Execution& call, const Record& record);
    void reduce(const Execution& call, const Record* record);
    [[nodiscard]] std::byte* resolve(const Execution& call, const Ref& ref) const noexcept;
    [[nodiscard]] uint64_t length_of(const Execution& call, const Ref& ref) const noexcept;
    [[nodiscard]] kernels::Store store_for(const Execution& call, const Ref& ref) const noexcept {
        return ref.space == Space::slot  ? call.stores.slot
               : ref.space == Space::out ? call.stores.out
                                         : kernels::Store::cached;
    }

    Segment& segment_;
    Membership& members_;
    Waiter waiter_;
    StoreTuner tuner_;
    RankControl& own_;
    std::atomic<uint64_t> calls_{0};   // others may look
    uint64_t base_ = 0;                // progress at the start of the current block
    uint64_t block_count_ = 0;         // blocks ever run, equal on all ranks
    std::vector<uint64_t> block_end_;  // progress at the end of the last blocks, by block % depth
    std::vector<std::byte> scratch_;
};

// The part layout that every executor shares: element counts rounded up to whole cache lines.
[[nodiscard]] uint64_t part_bytes(uint64_t piece_bytes, uint32_t parts,
                                  size_t element_bytes) noexcept;

}  // namespace unisono
