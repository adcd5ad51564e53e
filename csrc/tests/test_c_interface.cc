// Tests the functions of unisono.h without Python: calls and messages of several threads of each
// rank at the same time, errors, and the end of a group.
#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "capi/handed_group.h"
#include "tests/calls.h"
#include "tests/report.h"
#include "tests/world.h"

namespace {

using namespace unisono;
using namespace unisono::test;

// Prepares sums of int32 with a plan written by hand, and refuses all others.
class HandOwner final : public capi::Owner {
  public:
    HandOwner(uint32_t rank, uint32_t ranks, std::atomic<int>& alive)
        : rank_(rank), ranks_(ranks), alive_(alive) {
        ++alive_;
    }
    ~HandOwner() override { --alive_; }

    std::shared_ptr<const Prepared> prepare(const unisono_collective& made) override {
        if (made.op != UNISONO_ALL_REDUCE || made.dtype != UNISONO_INT32)
            throw Error(Fault::unsupported, "expected a sum of int32");
        const Step step{Kind::direct, made.count, 0, 256, 0, true};
        const CallArgs args{OpKind::all_reduce, DType::int32, ReduceOp::sum, -1, made.count, 7};
        return std::make_shared<Prepared>(Prepared{plan_of(step, rank_, ranks_), args,
                                                   fingerprint(args), 256, made.count * 4,
                                                   made.count * 4, StorePolicy::adaptive});
    }
    unisono_group* split(int32_t, int32_t) override {
        throw Error(Fault::mismatch, std::string(5000, 'x'));  // longer than an error's text
    }
    void reach(int32_t) override {}

  private:
    uint32_t rank_, ranks_;
    std::atomic<int>& alive_;
};

unisono_group* group_of(const Rank& rank, std::atomic<int>& alive) {
    auto shared = std::static_pointer_cast<Group>(rank.keep);
    const uint32_t ranks = rank.members->ranks();
    return capi::hand_over(std::move(shared), std::make_unique<HandOwner>(rank.rank, ranks, alive));
}

struct Failures {
    Report& report;
    void none(unisono_status status, const unisono_error& error) const {
        report.check(status == UNISONO_OK, error.text);
    }
    void as(unisono_status status, int expected, const unisono_error& error,
            const char* part) const {
        report.check(status == expected && std::strstr(error.text, part) != nullptr,
                     std::to_string(status) + ": " + error.text);
    }
};

// Sums with `run`, and two at a time with `begin`.
void sum_often(Report& report, unisono_group* group) {
    const unisono_api& api = *group->api;
    const auto ranks = static_cast<int32_t>(api.ranks(group));
    const unisono_collective sum{UNISONO_ALL_REDUCE, UNISONO_INT32, UNISONO_SUM, -1, 1000};
    unisono_call* call = nullptr;
    unisono_error error{};
    Failures{report}.none(api.prepare(group, &sum, &call, &error), error);
    std::vector<int32_t> in(1000), out(1000), other(1000);
    for (int32_t turn = 0; turn < 30; ++turn) {
        std::iota(in.begin(), in.end(), turn);
        other = in;
        Failures{report}.none(api.run(call, in.data(), out.data(), kLong_s, &error), error);
        report.check(out[999] == ranks * (turn + 999) && in[0] == turn, "a sum");
        unisono_request* requests[2] = {};
        Failures{report}.none(api.begin(call, in.data(), out.data(), kLong_s, &requests[0], &error),
                              error);
        Failures{report}.none(
            api.begin(call, other.data(), other.data(), kLong_s, &requests[1], &error), error);
        unisono_status status = UNISONO_PENDING;
        while (status == UNISONO_PENDING) status = api.test(requests[0], &error);
        Failures{report}.none(status, error);
        Failures{report}.none(api.wait(requests[1], -1, &error), error);
        report.check(out == other && out[0] == ranks * turn, "a sum that was begun");
    }
    api.free_call(call);
}

// Sends messages around the ring of ranks.
void send_often(Report& report, unisono_group* group, uint64_t tag) {
    const unisono_api& api = *group->api;
    const auto rank = static_cast<int32_t>(api.rank(group));
    const auto ranks = static_cast<int32_t>(api.ranks(group));
    const int32_t right = (rank + 1) % ranks, left = (rank + ranks - 1) % ranks;
    unisono_error error{};
    for (const uint64_t count : {1U, 40U, 20'000U, 3U, 300U}) {
        std::vector<int32_t> sent(count, rank), got(count, -1);
        const unisono_message in{got.data(), count, UNISONO_INT32, left, tag};
        const unisono_message out{sent.data(), count, UNISONO_INT32, right, tag};
        unisono_request* request = nullptr;
        Failures{report}.none(api.begin_receive(group, &in, kLong_s, &request, &error), error);
        Failures{report}.none(api.send(group, &out, kLong_s, &error), error);
        Failures{report}.none(api.wait(request, -1, &error), error);
        report.check(got == std::vector<int32_t>(count, left), "a message");
    }
}

void check_threads(Report& report, uint32_t ranks) {
    std::atomic<int> alive{0};
    {
        World world(shape_of(ranks, 2), Mapping::own, ranks);
        world.run([&](Rank& rank) {
            unisono_group* const group = group_of(rank, alive);
            std::vector<std::thread> threads;
            threads.emplace_back([&] { sum_often(report, group); });
            for (const uint64_t tag : {1U, 2U})
                threads.emplace_back([&, tag] { send_often(report, group, tag); });
            threads.emplace_back([group] {
                for (int i = 0; i < 1000; ++i) {
                    group->api->retain(group);
                    group->api->release(group);
                }
            });
            for (std::thread& thread : threads) thread.join();
            group->api->release(group);
        });
    }
    report.check(alive == 0, "owners that nobody freed");
}

void check_errors(Report& report) {
    std::atomic<int> alive{0};
    World world(shape_of(1, 2), Mapping::own, 1);
    unisono_group* const group = group_of(world[0], alive);
    const unisono_api& api = *group->api;
    const Failures failures{report};
    unisono_error error{};
    unisono_call* call = nullptr;
    unisono_collective sum{UNISONO_ALL_REDUCE, UNISONO_FLOAT32, UNISONO_SUM, -1, 4};
    failures.as(api.prepare(group, &sum, &call, &error), UNISONO_UNSUPPORTED, error, "int32");
    report.check(api.prepare(group, &sum, &call, nullptr) == UNISONO_UNSUPPORTED, "no text wanted");
    failures.as(api.prepare(group, nullptr, &call, &error), UNISONO_INVALID, error, "collective");
    sum.dtype = UNISONO_INT32;
    failures.as(api.prepare(group, &sum, nullptr, &error), UNISONO_INVALID, error, "call");
    failures.none(api.prepare(group, &sum, &call, &error), error);
    std::vector<int32_t> x(8, 1);
    failures.as(api.run(nullptr, x.data(), x.data(), 1, &error), UNISONO_INVALID, error, "call");
    failures.as(api.run(call, x.data(), x.data() + 1, 1, &error), UNISONO_INVALID, error,
                "overlap");
    failures.as(api.begin(call, x.data(), x.data(), 1, nullptr, &error), UNISONO_INVALID, error,
                "request");
    failures.as(api.wait(nullptr, 1, &error), UNISONO_INVALID, error, "request");
    unisono_group* part = nullptr;
    const unisono_status split = api.split(group, 0, 0, &part, &error);
    report.check(split == UNISONO_MISMATCH && std::strlen(error.text) == sizeof error.text - 1,
                 "a long text is cut");
    unisono_request* request = nullptr;
    const unisono_message in{x.data(), 1, UNISONO_INT32, 0, 0};
    failures.none(api.begin_receive(group, &in, kLong_s, &request, &error), error);
    report.check(api.wait(request, 0.01, &error) == UNISONO_PENDING, "a receive without a send");
    api.abort(group, "the end");
    failures.as(api.wait(request, -1, &error), UNISONO_ABORTED, error, "rank 0: the end");
    failures.as(api.run(call, x.data(), x.data(), 1, &error), UNISONO_ABORTED, error, "the end");
    api.free_call(call);
    api.release(group);
    report.check(alive == 0, "the owner that nobody freed");
}

}  // namespace

int main() {
    Report report;
    for (const uint32_t ranks : {1U, 2U, 5U}) check_threads(report, ranks);
    check_errors(report);
    return report.finish();
}
