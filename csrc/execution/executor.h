// Interprets plans over the blocks of a message, on the shared memory of one group.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "core/call.h"
#include "core/operation_counters.h"
#include "execution/call_check.h"
#include "execution/core_sharing.h"
#include "execution/plan.h"
#include "execution/remote_slots.h"
#include "execution/staging_ring.h"
#include "execution/store_policy.h"
#include "kernels/kernels.h"
#include "memory/shared_heap.h"
#include "memory/single_copy.h"
#include "memory/waiter.h"

namespace unisono {

struct Piece {
    std::byte* data;
    uint64_t bytes;
};

// The input or output pieces of a call. A few pieces need no heap memory.
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

// The form of a call whose arrays lie in the ranks' shared heaps: peers read them in place.
struct HeapForm {
    std::shared_ptr<const Plan> plan;
    uint64_t hash;
    uint64_t block_bytes;
    bool in, out;  // Peers access the input, the output.
};

// One call in flight: a plan, its arguments, and its state. The call can be interrupted and
// resumed.
struct Execution {
    std::shared_ptr<const Plan> plan;
    CallArgs args;
    uint64_t hash;  // fingerprint(args)
    CallVolume volume{};
    uint64_t block_bytes;
    // Bytes of the longest piece on any rank. Every rank divides this length into blocks, so that
    // all ranks have the same number of blocks.
    uint64_t longest_bytes;
    Pieces in, out;
    StorePolicy policy = StorePolicy::adaptive;
    // Number of blocks by which the first round of the schedule runs ahead of the last round. Each
    // step runs early rounds of later blocks before late rounds of earlier blocks. So the network
    // carries data while a rank waits. The lead is equal on all ranks.
    uint32_t lead = 0;
    // The reason, if this rank refuses its arguments. A refused call takes a number but is not run.
    std::shared_ptr<const std::string> refusal;
    std::shared_ptr<const HeapForm> heap_form;  // not set if the call has no such form

    Traffic traffic{};
    Stores stores;  // kinds of store instructions (cached or streaming) for the current block
    bool measures_distance = false;  // to the peers' cores

    uint64_t seq = 0;                // Number of the call; 0: not started.
    StagingRing* staging = nullptr;  // Staging buffers of the slots.
    uint64_t slot_bytes = 0;         // Bytes from one slot to the next.
    uint64_t staged_bytes = 0;       // Bytes of a block's slots, on the rank with the most.
    uint64_t blocks = 0;
    uint64_t step = 0;  // number of the current step, from 0 to blocks + lead
    size_t record = 0;
    uint64_t block = 0;  // block for which the current record runs
    [[nodiscard]] uint64_t ended() const noexcept { return step > lead ? step - lead : 0; }
    [[nodiscard]] uint64_t ahead() const noexcept { return block - ended(); }
    // Returns the number of blocks by which this round runs ahead of the last round in each step;
    // see `lead`.
    [[nodiscard]] uint32_t lead_of(uint32_t round) const noexcept {
        return lead == 0 ? 0 : lead - round * (lead + 1) / plan->rounds;
    }
    uint32_t verified = 0;    // The next rank whose header must be compared.
    size_t readers_done = 0;  // Readers that have finished with this rank's shared memory.
    bool announced = false;   // The peers can see this rank's header.
};

class Executor {
  public:
    // `counters` counts each completed call. `remote_slots` is set if the group has ranks on other
    // hosts.
    Executor(View& view, Membership& members, Waiter waiter, StoreRule stores,
             OperationCounters& counters, SharedHeap& heap, RemoteSlots* remote_slots = nullptr);

    // Runs the call. Returns true once the call is complete, and false if a wait would exceed
    // `limit_s` (0: the deadline is the only limit). Throws Error.
    bool advance(Execution& call, Deadline& deadline, const Interrupted& interrupted,
                 double limit_s);
    // Gives up a call that has started, and tells the peers, which would otherwise wait until their
    // timeout.
    void abandon(const Execution& call, const char* why) noexcept;

    // Returns true if this rank can read the memory of all other ranks of its host.
    [[nodiscard]] bool can_read_peers() const noexcept { return cross_memory_.reach_all(); }
    [[nodiscard]] CrossMemory& cross_memory() noexcept { return cross_memory_; }
    [[nodiscard]] uint64_t calls() const noexcept { return calls_.load(std::memory_order_relaxed); }

  private:
    struct Wait {
        Execution& call;
        Deadline& deadline;
        const Interrupted& interrupted;
        double limit_s;
        // Returns true if the thread of the program waits. A background thread has no signals.
        [[nodiscard]] bool in_foreground() const noexcept { return static_cast<bool>(interrupted); }
        [[nodiscard]] std::string late(const CallCheck& call_check) const {
            return call_check.late(call.seq, deadline.timeout_s());
        }
    };
    [[nodiscard]] std::atomic<uint64_t>& waited_ns(const Wait& wait) noexcept {
        return counters_.waited_ns(wait.call.volume.row);
    }

    void begin(Execution& call);
    void choose_form(Execution& call) const;
    void prepare(Execution& call);
    void reserve_scratch(const Execution& call);
    void refuse(std::string_view reason) noexcept;
    [[nodiscard]] uint64_t next_number() noexcept;
    bool run_steps(Wait wait);
    void announce(Execution& call) noexcept;
    bool reuse_slots(Wait& wait);
    bool run_step(Wait& wait);
    bool run_record(Wait& wait, const Record* record);
    void choose_stores(Execution& call) noexcept;
    void post(Execution& call, uint32_t value);
    void send_slots(const Execution& call, uint32_t value);
    bool flush_sends(Wait& wait);
    void check_remote_readers(const Execution& call);
    bool wait_progress(Wait& wait, const Record& record);
    bool verify_all(Wait& wait);
    bool await_readers(Wait& wait);
    template <class Ready>
    bool wait_for(Wait& wait, uint32_t peer, Ready ready);
    template <class Ready>
    bool wait_local(Wait& wait, uint32_t peer, Ready ready);
    template <class Ready>
    bool wait_remote(Wait& wait, uint32_t peer, Ready ready);
    void copy(const Execution& call, const Record& record);
    void reduce(const Execution& call, const Record* record);
    void reduce_some(const Execution& call, const Record* record, uint64_t at, uint64_t bytes);
    [[nodiscard]] const std::byte* source(const Execution& call, const Ref& ref, uint64_t at,
                                          uint64_t bytes);
    // Returns true if the memory of an operand belongs to another process, or to another thread
    // that may unmap it (single copy).
    [[nodiscard]] static bool is_foreign(const Execution& call, const Ref& ref) noexcept {
        return ref.space == Space::shared && !call.args.in_heaps;
    }
    [[nodiscard]] std::byte* in_heap(const Execution& call, const Ref& ref, uint64_t at,
                                     uint64_t bytes);
    void write_back(const Execution& call, const Record* record, uint64_t at, uint64_t bytes);
    [[nodiscard]] const std::byte* slot_of(const Execution& call, const Ref& ref) const noexcept;
    void share(const Execution& call, const Ref& slot, const Ref& memory) const noexcept;
    [[nodiscard]] std::byte* resolve(const Execution& call, const Ref& ref) const noexcept;
    [[nodiscard]] uint64_t length_of(const Execution& call, const Ref& ref) const noexcept;
    [[nodiscard]] kernels::Store store_for(const Execution& call, const Ref& ref) const noexcept {
        return ref.space == Space::slot  ? call.stores.slot
               : ref.space == Space::out ? call.stores.out
                                         : kernels::Store::cached;
    }

    // Returns true if a transfer between hosts takes so long that the wait for it sleeps early.
    [[nodiscard]] bool is_large(const Execution& call) const noexcept {
        return call.staged_bytes > kLeastLargeBytes || call.args.in_heaps;
    }
    [[nodiscard]] StagingRing* staging_for(const Execution& call, uint64_t bytes);
    [[nodiscard]] Fence fence() const noexcept { return view_.fence(); }

    static constexpr uint64_t kLeastLargeBytes = 4096;

    View& view_;
    Membership& members_;
    OperationCounters& counters_;
    RemoteSlots* remote_slots_;
    // `waiter_` waits for ranks of this host, the other two for ranks of other hosts.
    Waiter waiter_, remote_waiter_, small_remote_waiter_;
    StoreRule stores_;
    Distance distance_;
    DistanceTurns distance_turns_;
    RankControl& own_;
    CoreSharing core_sharing_;
    std::atomic<uint64_t> calls_{0};  // Other threads may read it.
    uint64_t base_ = 0;               // Progress at the start of the current step.
    uint64_t last_hash_ = 0;          // Fingerprint of the previous call.
    std::vector<uint64_t> passed_;    // By peer: the last known progress.
    std::vector<Load> loads_;         // Slots for one peer in one post.
    CallCheck call_check_;
    std::array<StagingRing, kSizeClasses> staging_rings_;  // in ascending order of buffer size
    std::vector<std::byte> scratch_, fetched_;
    SharedHeap& heap_;
    CrossMemory cross_memory_;
};

// Returns the bytes of each part of a piece: its share of the elements, rounded up to whole cache
// lines. All executors use this layout.
[[nodiscard]] uint64_t part_bytes(uint64_t piece_bytes, uint32_t parts,
                                  size_t element_bytes) noexcept;

}  // namespace unisono
