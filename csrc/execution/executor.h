// Interprets plans over the blocks of a message, on the shared memory of one group.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "core/call.h"
#include "execution/call_check.h"
#include "execution/plan.h"
#include "execution/remote_slots.h"
#include "execution/store_policy.h"
#include "kernels/kernels.h"
#include "memory/single_copy.h"
#include "memory/waiter.h"

namespace unisono {

struct Piece {
    std::byte* data;
    uint64_t bytes;
};

// The pieces of one side of a call; a few of them without asking for memory.
class Pieces {
  public:
    void push_back(Piece piece) {
        if (count_ < kFew) {
            few_[count_] = piece;
        } else {
            if (count_ == kFew) many_.assign(few_.begin(), few_.end());
            many_.push_back(piece);
        }
        ++count_;
    }
    [[nodiscard]] size_t size() const noexcept { return count_; }
    [[nodiscard]] const Piece* begin() const noexcept {
        return count_ <= kFew ? few_.data() : many_.data();
    }
    [[nodiscard]] const Piece* end() const noexcept { return begin() + count_; }
    [[nodiscard]] const Piece& operator[](size_t i) const noexcept { return begin()[i]; }

  private:
    static constexpr size_t kFew = 4;
    size_t count_ = 0;
    std::array<Piece, kFew> few_;
    std::vector<Piece> many_;
};

// Where the calls of one size class are in their strip: at the same area on all ranks.
class Lane {
  public:
    Lane(const View& view, size_t strip)
        : view_(view),
          strip_(strip),
          area_bytes_(view.segment().strip(strip).area_bytes),
          ends_(view.segment().strip(strip).depth, 0) {}
    [[nodiscard]] uint64_t area_bytes() const noexcept { return area_bytes_; }
    // Where slot 0 of a rank is for a block: the first that has not ended, or one `ahead` of it.
    [[nodiscard]] std::byte* area(uint32_t rank, uint64_t ahead) const noexcept {
        return view_.areas(rank, strip_) + position(ahead) * area_bytes_;
    }
    [[nodiscard]] Place place(uint64_t ahead) const noexcept {
        return {strip_, position(ahead), blocks_ + ahead};
    }
    // The progress at which all ranks are past the block that used that area before.
    [[nodiscard]] uint64_t reusable_at(uint64_t ahead) const noexcept {
        return ends_[position(ahead)];
    }
    [[nodiscard]] uint64_t depth() const noexcept { return ends_.size(); }
    void end(uint64_t progress) noexcept {
        ends_[position_] = progress;
        if (++position_ == ends_.size()) position_ = 0;
        ++blocks_;
    }

  private:
    [[nodiscard]] uint64_t position(uint64_t ahead) const noexcept {
        const uint64_t at = position_ + ahead;
        return at < ends_.size() ? at : at - ends_.size();
    }

    const View& view_;
    size_t strip_;
    uint64_t area_bytes_;
    uint64_t position_ = 0;       // of the area of the first block that has not ended
    uint64_t blocks_ = 0;         // that have ended
    std::vector<uint64_t> ends_;  // by area: progress at the end of the block that used it last
};

// One call in flight: a plan, its arguments, and how far it has come. Resumable.
struct Execution {
    std::shared_ptr<const Plan> plan;
    CallArgs args;
    uint64_t hash;  // fingerprint(args)
    uint64_t block_bytes;
    uint64_t longest_bytes;  // of all pieces of all ranks: they must count the same blocks
    Pieces in, out;
    StorePolicy policy = StorePolicy::adaptive;
    // How many blocks the first round of the schedule runs ahead of the last. Each step then does
    // the early rounds of later blocks before the late rounds of an earlier one, so that a network
    // has something to carry while a rank waits. All ranks have the same.
    uint32_t lead = 0;
    // Why this rank refuses its arguments, if it does: it takes no part in the call, but its
    // number.
    std::shared_ptr<const std::string> refusal;

    Traffic traffic{};
    Stores stores;  // of the current block

    uint64_t seq = 0;         // 0: not begun
    Lane* lane = nullptr;     // where the slots are
    uint64_t slot_bytes = 0;  // from one slot to the next
    uint64_t blocks = 0;
    uint64_t step = 0;  // of blocks + lead
    size_t record = 0;
    uint64_t block = 0;  // of the current record
    [[nodiscard]] uint64_t ended() const noexcept { return step > lead ? step - lead : 0; }
    [[nodiscard]] uint64_t ahead() const noexcept { return block - ended(); }
    // By how many blocks a round runs ahead of the last one.
    [[nodiscard]] uint32_t lead_of(uint32_t round) const noexcept {
        return lead == 0 ? 0 : lead - round * (lead + 1) / plan->rounds;
    }
    uint32_t verified = 0;   // peers whose header has been seen to agree
    size_t returned = 0;     // readers that are done with what this rank has lent
    bool announced = false;  // own header is visible
};

class Executor {
  public:
    // `courier`: where the group has ranks on other hosts.
    Executor(View& view, Membership& members, Waiter waiter, StoreRule stores,
             Courier* courier = nullptr);

    // Runs until the call is complete (true), or until it would have to wait longer than
    // `limit_s` (false; 0 = as long as the deadline allows). Throws Error.
    bool advance(Execution& call, Deadline& deadline, const Interrupted& interrupted,
                 double limit_s);
    // A call that has begun will not be completed: the others learn it, for they would wait in
    // all_left.
    void abandon(const Execution& call, const char* why) noexcept;

    // Whether this rank can read the memory of all others of its host.
    [[nodiscard]] bool can_borrow() const noexcept { return loans_.reach_all(); }
    [[nodiscard]] Loans& loans() noexcept { return loans_; }
    [[nodiscard]] uint64_t calls() const noexcept { return calls_.load(std::memory_order_relaxed); }

  private:
    struct Wait {
        Execution& call;
        Deadline& deadline;
        const Interrupted& interrupted;
        double limit_s;
        [[nodiscard]] std::string late(const Agreement& agreement) const {
            return agreement.late(call.seq, deadline.timeout_s());
        }
    };

    void begin(Execution& call);
    void prepare(Execution& call);
    void reserve_scratch(const Execution& call);
    void refuse(std::string_view reason) noexcept;
    [[nodiscard]] uint64_t next_number() noexcept;
    bool carry_on(Wait wait);
    void announce(Execution& call) noexcept;
    bool reuse_slots(Wait& wait);
    bool run_step(Wait& wait);
    bool run_record(Wait& wait, const Record* record);
    void choose_stores(Execution& call) noexcept;
    void post(Execution& call, uint32_t value);
    void show(const Execution& call, uint32_t value);
    bool hand_over(Wait& wait);
    void look_for_readers(const Execution& call);
    bool wait_progress(Wait& wait, const Record& record);
    bool verify_all(Wait& wait);
    bool take_back(Wait& wait);
    template <class Ready>
    bool wait_for(Wait& wait, uint32_t peer, Ready ready);
    template <class Ready>
    bool wait_here(Wait& wait, uint32_t peer, Ready ready);
    template <class Ready>
    bool wait_away(Wait& wait, uint32_t peer, Ready ready);
    void copy(const Execution& call, const Record& record);
    void reduce(const Execution& call, const Record* record);
    void reduce_some(const Execution& call, const Record* record, uint64_t at, uint64_t bytes);
    void lend(const Execution& call, const Ref& slot, const Ref& memory) const noexcept;
    [[nodiscard]] std::byte* resolve(const Execution& call, const Ref& ref) const noexcept;
    [[nodiscard]] uint64_t length_of(const Execution& call, const Ref& ref) const noexcept;
    [[nodiscard]] kernels::Store store_for(const Execution& call, const Ref& ref) const noexcept {
        return ref.space == Space::slot  ? call.stores.slot
               : ref.space == Space::out ? call.stores.out
                                         : kernels::Store::cached;
    }

    // Whether the call's blocks are large enough for the caches to matter.
    [[nodiscard]] bool is_large(const Execution& call) const noexcept {
        return call.lane == &lanes_.back();
    }
    [[nodiscard]] Lane* lane_for(const Execution& call, uint64_t bytes);
    [[nodiscard]] Fence fence() const noexcept { return view_.fence(); }

    View& view_;
    Membership& members_;
    Courier* courier_;
    Waiter waiter_, away_, away_small_;  // for ranks of this host, and of others
    StoreRule stores_;
    Distance distance_;
    RankControl& own_;
    std::atomic<uint64_t> calls_{0};  // others may look
    uint64_t base_ = 0;               // progress at the start of the current step
    uint64_t last_hash_ = 0;          // of the call before
    std::vector<uint64_t> passed_;    // by peer: the progress at which it was seen last
    std::vector<Load> loads_;         // of one post to one peer
    Agreement agreement_;
    std::array<Lane, kStrips> lanes_;  // in the order of their areas' sizes
    std::vector<std::byte> scratch_, borrowed_;
    Loans loans_;
};

// The part layout that every executor shares: element counts rounded up to whole cache lines.
[[nodiscard]] uint64_t part_bytes(uint64_t piece_bytes, uint32_t parts,
                                  size_t element_bytes) noexcept;

}  // namespace unisono
