// A group whose ranks are threads of this process, for tests of the core.
#pragma once

#include <unistd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "execution/group.h"
#include "tests/report.h"

namespace unisono::test {

inline constexpr double kLong_s = 60;  // timeout of waits that must not time out

inline void pause(double s) {
    std::this_thread::sleep_for(std::chrono::duration<double>(s));
}

struct Outcome {
    Fault fault = Fault::none;
    std::string text;
};

template <class F>
Outcome outcome_of(F&& call) {
    try {
        call();
    } catch (const Error& error) {
        return {error.fault(), error.what()};
    }
    return {};
}

inline void expect(Report& report, const Outcome& outcome, Fault fault, const std::string& part,
                   const std::string& what) {
    report.check(
        outcome.fault == fault && outcome.text.find(part) != std::string::npos,
        what + " gave " + std::to_string(static_cast<int>(outcome.fault)) + ": " + outcome.text);
}

// Returns a shape in which few messages fit, so that the tests fill the rings and wrap around.
inline SegmentShape shape_of(uint32_t ranks, uint32_t depth, uint64_t pair_slots = 2,
                             uint64_t pair_bytes = 256) {
    return {ranks, depth, 4096 * ((ranks + 3) / 4), pair_slots, pair_bytes};
}

// The mappings of the segment. `own`: every rank maps the segment separately, as processes do.
// `one`: all ranks use one mapping. A thread sanitizer identifies memory by its address, so it
// detects races between ranks only with one mapping.
enum class Mapping { own, one };

struct Rank {
    uint32_t rank;
    Segment* segment;
    Membership* members;
    Dispatcher* dispatcher;
    p2p::Engine* p2p;
    const OperationCounters* counters;
    std::function<void()> close;
    std::shared_ptr<void> keep;
};

inline Rank rank_of(std::shared_ptr<Group> group, uint32_t rank) {
    Group& g = *group;
    return {rank,     &g.segment(),  &g.members(),        &g.dispatcher(),
            &g.p2p(), &g.counters(), [&g] { g.close(); }, std::move(group)};
}

class World {
  public:
    static constexpr std::array<uint8_t, 16> nonce{1, 2, 3};

    World(const SegmentShape& shape, Mapping mapping, uint32_t cores)
        : fd_(create_segment(shape, nonce)) {
        if (mapping == Mapping::one)
            segment_ = std::make_unique<Segment>(Descriptor(::dup(fd_.get())));
        for (uint32_t r = 0; r < shape.ranks; ++r) {
            ranks_.push_back(segment_ ? on_one_mapping(r, cores)
                                      : rank_of(std::make_shared<Group>(
                                                    Descriptor(::dup(fd_.get())), r, nonce, cores),
                                                r));
        }
    }
    ~World() {
        for (Rank& rank : ranks_) rank.close();
    }

    Rank& operator[](uint32_t r) { return ranks_[r]; }
    // Runs `body` once per rank, each in a thread.
    void run(const std::function<void(Rank&)>& body) {
        std::vector<std::thread> threads;
        for (Rank& rank : ranks_) threads.emplace_back([&body, &rank] { body(rank); });
        for (std::thread& thread : threads) thread.join();
    }

  private:
    struct Parts {
        Parts(Segment& segment, uint32_t rank, uint32_t cores)
            : view(segment, rank, HostRanks::one_host(segment.shape().ranks)),
              members(view, nonce),
              waiter(members, SpinPolicy::for_group(segment.shape().ranks, cores)),
              heap(view),
              executor(view, members, waiter, StoreRule(segment.shape().ranks), counters, heap),
              dispatcher(executor, members),
              p2p(view, members, waiter, executor.cross_memory(), counters) {}
        View view;
        Membership members;
        Waiter waiter;
        OperationCounters counters;
        SharedHeap heap;
        Executor executor;
        Dispatcher dispatcher;
        p2p::Engine p2p;
    };

    Rank on_one_mapping(uint32_t rank, uint32_t cores) {
        auto parts = std::make_shared<Parts>(*segment_, rank, cores);
        Parts& p = *parts;
        const auto close = [&p] {
            p.members.leave();
            p.dispatcher.stop();
            p.p2p.stop();
        };
        return {rank,   segment_.get(), &p.members, &p.dispatcher,
                &p.p2p, &p.counters,    close,      std::move(parts)};
    }

    Descriptor fd_;
    std::unique_ptr<Segment> segment_;
    std::vector<Rank> ranks_;
};

inline p2p::Message message(std::vector<uint8_t>& data, int32_t peer, uint64_t tag) {
    return {reinterpret_cast<std::byte*>(data.data()), data.size(), DType::uint8, peer, tag};
}

}  // namespace unisono::test
