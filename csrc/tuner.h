// Chooses how a call stores: through the caches or past them, by timing both while it works.
//
// Which is faster depends on where the hypervisor has put the cores, and changes while a program
// runs: a staging slot that the peer's cache still holds costs 4 times as much from a far core. So
// the last rank (a root is likely another, and runs ahead) times its calls, now and then tries
// another way for one call (or for some blocks of a long one), and advises all ranks through the
// group's memory. The bits of the result are the same either way, so ranks need not agree at any
// moment.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <unordered_map>

#include "control.h"
#include "kernels/kernels.h"

namespace unisono {

struct Stores {
    kernels::Store slot = kernels::Store::cached;
    kernels::Store out = kernels::Store::cached;
};

enum class StorePolicy : uint8_t { cached, streaming, adaptive };

// The stores of one call, block by block.
struct StorePlan {
    uint64_t hash = 0;  // of the call; 0: not tuned
    uint64_t blocks = 0;
    uint8_t usual = 0;  // ways, see tuner.cc
    uint8_t trial = 0;
    uint64_t trial_begin = 0;  // blocks [begin, end) use the trial way
    uint64_t trial_end = 0;
    uint8_t ways = 1;  // how many ways make sense for this call
    std::chrono::steady_clock::time_point started{}, trial_started{}, trial_ended{};
};

class StoreTuner {
  public:
    StoreTuner(GroupControl& group, bool decides) noexcept : group_(group), decides_(decides) {}

    // `bytes` is the caller's larger buffer. Below some size nothing but the caches makes sense.
    void begin(StorePlan& plan, StorePolicy policy, uint64_t hash, uint64_t blocks, uint64_t bytes);
    // At the start of each block.
    [[nodiscard]] Stores at_block(StorePlan& plan, uint64_t block);
    void end(StorePlan& plan);

  private:
    using Clock = std::chrono::steady_clock;
    static constexpr size_t kWays = 4;

    struct Record {
        std::array<double, kWays> block_s{};  // average time of a block; 0: never tried
        bool met = false;
        uint8_t usual = 0;
        uint8_t next = 0;         // the way to try, or tried last
        uint8_t last = 0;         // the way of the call before
        uint32_t streak = 0;      // calls that way before it
        uint32_t trial_left = 0;  // calls
        double spent_s = 0;       // on this trial
        double expected_s = 0;    // of the usual way, when it was chosen
        Clock::time_point next_trial{}, next_drift{};
    };

    static void learn_long(Record& record, const StorePlan& plan, Clock::time_point now);
    static void learn_short(Record& record, const StorePlan& plan, Clock::time_point now);
    static void learn(Record& record, uint8_t way, double block_s) noexcept;
    [[nodiscard]] static bool untried(const Record& record, uint8_t ways) noexcept;
    static void choose(Record& record, uint8_t ways, Clock::time_point now) noexcept;
    static void begin_trial(Record& record, uint8_t ways, uint32_t calls) noexcept;
    static void end_trial(Record& record, Clock::time_point now, double trial_s) noexcept;
    void advise(uint64_t hash, const Record& record) noexcept;

    GroupControl& group_;
    bool decides_;
    std::unordered_map<uint64_t, Record> records_;
};

}  // namespace unisono
