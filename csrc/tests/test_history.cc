// Tests reads of the call history during writes. Each read must find one complete call, or none.
#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "core/call.h"
#include "core/call_fingerprint.h"
#include "memory/group_memory.h"
#include "tests/report.h"
#include "tests/world.h"

namespace {

using namespace unisono;
using namespace unisono::test;

constexpr uint64_t kCalls = 300'000;

// Returns the arguments of a call. All of them follow from its number.
CallArgs args_of(uint64_t seq) {
    return {OpKind::all_reduce,
            DType::float32,
            ReduceOp::sum,
            static_cast<int32_t>(seq & 0xffff),
            seq,
            0};
}
uint64_t hash_of(uint64_t seq) {
    return (seq * 0x9e3779b97f4a7c15ULL) & kHashMask;
}
LastCall called_of(uint64_t seq) {
    const CallArgs args = args_of(seq);
    const auto kind = static_cast<uint32_t>(args.dtype) << 16;
    return {header_of(seq, hash_of(seq)), seq, args.count, hash_of(seq), kind, args.root};
}
std::string text_of(uint64_t seq) {
    return "all_reduce(sum, float32[" + std::to_string(seq) +
           "], root=" + std::to_string(seq & 0xffff) + ")";
}

// Reads a record of `history` until the writers end, and once more afterwards.
void read(Report& report, const RankControl& history, const std::atomic<bool>& over,
          const std::string& what) {
    const auto own = std::make_unique<RankControl>();
    uint64_t found = 0, wrong = 0;
    for (bool last = false; !last;) {
        last = over.load();
        const uint64_t seq = history.calls[1].seq.load();
        if (seq == 0) continue;
        record_call(*own, seq, args_of(seq), hash_of(seq));
        wrong += differ(*own, history, seq);
        const std::string text = call_text(history, seq);
        found += text == text_of(seq);
        wrong += text != text_of(seq) && text != "a call that is no longer in the history";
        const LastCall called = last_call_of(history);
        wrong += called.seq != 0 && (called.hash != hash_of(called.seq) ||
                                     called.header != header_of(called.seq, called.hash));
    }
    report.check(wrong == 0,
                 what + ": " + std::to_string(wrong) + " reads found a mixture of two calls");
    report.check(found > 0, what + ": no read found a call");
}

// One thread makes calls while another reads their history. No read may find a mixture of two
// calls.
void check_read_while_written(Report& report) {
    const auto history = std::make_unique<RankControl>();
    std::atomic<bool> over{false};
    std::thread reader([&] { read(report, *history, over, "a peer"); });
    for (uint64_t i = 0; i < kCalls; ++i) {
        const uint64_t seq = 1 + i * kCallHistory;
        record_call(*history, seq, args_of(seq), hash_of(seq));
        history->header.store(header_of(seq, hash_of(seq)), std::memory_order_release);
        if (i % 64 == 0) std::this_thread::yield();
    }
    over = true;
    reader.join();
}

// Two threads report the calls of a rank on another host, and one of them reports old calls. An old
// report must not replace a newer one.
void check_calls_reported_over_two_paths(Report& report) {
    Segment segment(create_segment(shape_of(1, 2), World::nonce));
    View view(segment, 0, HostRanks{2, {0}});
    std::atomic<bool> over{false};
    std::atomic<uint64_t> behind{0};
    std::thread reader([&] { read(report, view.control(1), over, "a mirror"); });
    std::thread late([&] {
        while (!over.load()) {
            const uint64_t i = behind.load();
            view.update_last_call(1, called_of(1 + (i ? i - 1 : 0) * kCallHistory));
        }
    });
    for (uint64_t i = 0; i < kCalls; ++i) {
        view.update_last_call(1, called_of(1 + i * kCallHistory));
        behind = i;
        if (i % 64 == 0) std::this_thread::yield();
    }
    over = true;
    reader.join();
    late.join();
    const uint64_t last = 1 + (kCalls - 1) * kCallHistory;
    report.check(call_text(view.control(1), last) == text_of(last),
                 "an old report replaced a newer one");
}

// A very old report must not replace the latest one. The two calls are so far apart that the call
// numbers in their headers, which have only 24 bits, do not tell which call is later.
void check_calls_far_apart(Report& report) {
    Segment segment(create_segment(shape_of(1, 2), World::nonce));
    View view(segment, 0, HostRanks{2, {0}});
    const LastCall last = called_of(1 + (uint64_t{3} << 22));
    for (const uint64_t seq : {uint64_t{1}, last.seq, uint64_t{1}, uint64_t{2}})
        view.update_last_call(1, called_of(seq));
    report.check(view.control(1).header.load() == last.header,
                 "a very old report replaced the latest one");
}

}  // namespace

int main() {
    Report report;
    check_calls_far_apart(report);
    check_read_while_written(report);
    check_calls_reported_over_two_paths(report);
    return report.finish();
}
