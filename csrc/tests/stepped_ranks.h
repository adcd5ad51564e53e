// Tests of messages step by step. One thread plays all ranks, so that each test controls the order
// of steps.
#pragma once

#include <algorithm>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "tests/host_groups.h"
#include "tests/message_ranks.h"

namespace unisono::test {

inline constexpr uint64_t kOther = 9;   // The tag of messages that no receive matches.
inline constexpr size_t kEager = 8192;  // Bytes of a message that goes through the byte ring.
inline constexpr size_t kMostEager =
    16384;  // Largest eager message, in bytes, if ranks share cores.
// More eager messages than the peer has room for.
inline constexpr size_t kMost = 60;
inline constexpr size_t kLarge = 300'000;

// Ranks that one thread advances. The world is destroyed first, which ends the requests before
// their memory is freed.
template <class SomeWorld>
class SteppedRanksOn {
  public:
    template <class... Arguments>
    explicit SteppedRanksOn(uint32_t ranks, Arguments&&... arguments)
        : world_(std::forward<Arguments>(arguments)...), ranks_(ranks) {}

    SomeWorld& world() { return world_; }
    p2p::Engine& operator[](uint32_t rank) { return *world_[rank].p2p; }
    p2p::Request& send(const Data& data, uint64_t tag, uint32_t from = 0, uint32_t to = 1) {
        Data& kept = datas_.emplace_back(data);
        return begin(requests_, world_[from], message(kept, static_cast<int32_t>(to), tag), true);
    }
    p2p::Request& receive(size_t bytes, uint64_t tag, int32_t from = 0, uint32_t rank = 1) {
        Data& data = datas_.emplace_back(bytes);
        return begin(requests_, world_[rank], message(data, from, tag), false);
    }
    static Data got(const p2p::Request& request) {
        const auto* const data = reinterpret_cast<const uint8_t*>(request.message().data);
        return {data, data + request.message().bytes};
    }
    // Makes one rank poll once.
    void poll(uint32_t rank) { static_cast<void>((*this)[rank].test(never_)); }
    void settle() {
        for (int i = 0; i < 20; ++i) {
            for (uint32_t r = 0; r < ranks_; ++r) poll(r);
        }
    }
    // Polls all ranks until the request is done, but not without end. Returns true if the request
    // succeeds.
    bool ends(p2p::Request& request) {
        for (int i = 0; i < 1000 && !request.done(); ++i) settle();
        return request.done() && !request.error();
    }
    bool brings(p2p::Request& request, const Data& data) {
        return ends(request) && got(request) == data;
    }
    // Fills the room from rank 0 to rank 1 with messages that no receive matches, plus three
    // messages that are held back. Rank 1 must have a pending receive; otherwise it does not poll.
    std::vector<p2p::Request*> fill() {
        std::vector<p2p::Request*> sends;
        for (size_t held = 0; held < 3 && sends.size() < kMost; held += !sends.back()->done()) {
            sends.push_back(&send(data_of(sends.size(), kEager), kOther));
            settle();
        }
        return sends;
    }
    [[nodiscard]] size_t under_way() const {
        return static_cast<size_t>(std::count_if(requests_.begin(), requests_.end(),
                                                 [](const auto& r) { return !r.done(); }));
    }
    // Checks the errors of all requests that have failed.
    void check_errors(Report& report, Fault fault, const std::string& part,
                      const std::string& what) const {
        for (const p2p::Request& request : requests_) {
            if (!request.error()) continue;
            expect(report, Outcome{request.error()->fault(), request.error()->what()}, fault, part,
                   what);
        }
    }
    // Overwrites the memory of all messages, as a caller may do after the end of the requests.
    void scribble() {
        for (Data& data : datas_) std::fill(data.begin(), data.end(), uint8_t{0xee});
    }
    [[nodiscard]] bool is_scribbled() const {
        return std::all_of(datas_.begin(), datas_.end(), [](const Data& data) {
            return std::all_of(data.begin(), data.end(), [](uint8_t b) { return b == 0xee; });
        });
    }

  private:
    std::deque<Data> datas_;
    Requests requests_;
    // This request is tested, but never begun.
    p2p::Request never_{{nullptr, 0, DType::uint8, 0, 0}, false};
    SomeWorld world_;
    const uint32_t ranks_;
};

class SteppedRanks : public SteppedRanksOn<World> {
  public:
    explicit SteppedRanks(uint32_t ranks = 2, bool single_copy = true)
        : SteppedRanksOn(ranks, shape_of(ranks, 1, 512, 1 << 16), Mapping::own, ranks) {
        for (uint32_t r = 0; r < ranks; ++r) world()[r].p2p->use_single_copy(single_copy);
    }
    [[nodiscard]] p2p::Pair& pair() { return *world()[1].segment->pair(0, 1).shared; }
};

// Ranks that are each on a separate host.
class SteppedHosts : public SteppedRanksOn<Hosts> {
  public:
    explicit SteppedHosts(uint32_t ranks = 2, bool = true)
        : SteppedRanksOn(ranks, layout(ranks), 2U) {}

  private:
    static Layout layout(uint32_t ranks) {
        Layout hosts;
        for (uint32_t r = 0; r < ranks; ++r) hosts.push_back({r});
        return hosts;
    }
};

}  // namespace unisono::test
