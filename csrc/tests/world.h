// A group whose ranks are threads of this process, for tests of the core.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../group.h"

namespace unisono::test {

class Report {
  public:
    void check(bool ok, const std::string& what) {
        const std::lock_guard lock(mutex_);
        (ok ? passed_ : failed_) += 1;
        if (!ok && failed_ <= 20) std::printf("FAILED %s\n", what.c_str());
    }
    int finish() const {
        std::printf("%zu passed, %zu failed\n", passed_, failed_);
        return failed_ == 0 ? 0 : 1;
    }

  private:
    std::mutex mutex_;
    size_t passed_ = 0, failed_ = 0;
};

// What a call ended with.
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

// `own`: every rank maps the segment itself, as processes do. `one`: all ranks use one mapping, so
// that a thread sanitizer, which knows memory by its address, sees what passes between ranks.
enum class Mapping { own, one };

struct Rank {
    uint32_t rank;
    Segment* segment;
    Membership* members;
    Dispatcher* dispatcher;
    PostOffice* mail;
    std::function<void()> close;
    std::shared_ptr<void> keep;
};

inline Rank rank_of(std::shared_ptr<Group> group, uint32_t rank) {
    Group& g = *group;
    return {rank,      &g.segment(),        &g.members(),    &g.dispatcher(),
            &g.mail(), [&g] { g.close(); }, std::move(group)};
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
            : members(segment, rank, nonce),
              waiter(members, Patience::for_group(segment.shape().ranks, cores)),
              executor(segment, members, waiter, StoreRule(segment.shape().ranks, cores)),
              dispatcher(executor, members),
              mail(segment, members, waiter) {}
        Membership members;
        Waiter waiter;
        Executor executor;
        Dispatcher dispatcher;
        PostOffice mail;
    };

    Rank on_one_mapping(uint32_t rank, uint32_t cores) {
        auto parts = std::make_shared<Parts>(*segment_, rank, cores);
        Parts& p = *parts;
        const auto close = [&p] {
            p.members.leave();
            p.dispatcher.stop();
            p.mail.stop();
        };
        return {rank, segment_.get(), &p.members, &p.dispatcher, &p.mail, close, std::move(parts)};
    }

    Descriptor fd_;
    std::unique_ptr<Segment> segment_;
    std::vector<Rank> ranks_;
};

}  // namespace unisono::test
