// Tests of shared heaps: their allocator, calls on arrays in them, and their detachment after a
// failure. Ranks are threads and, except under a thread sanitizer, processes.
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <random>
#include <thread>

#include "tests/calls.h"
#include "tests/report.h"

namespace {

using namespace unisono;
using namespace unisono::test;

constexpr uint64_t kMiB = 1 << 20, kHeap = 96 * kMiB, kOffset = 4 * kMiB;

// A heap in a file, and a mapping of the same memory as a peer has it.
struct Heap {
    Heap() : fd(::memfd_create("heap", MFD_CLOEXEC)) {
        if (::ftruncate(fd.get(), kOffset + kHeap) != 0) std::abort();
        own = std::make_shared<OwnHeap>(fd.get(), kOffset, kHeap);
        void* base = ::mmap(nullptr, kHeap, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), kOffset);
        peers = static_cast<std::byte*>(base);
    }
    ~Heap() { ::munmap(peers, kHeap); }
    std::byte* at_peer(const std::shared_ptr<std::byte>& memory) const {
        return peers + (memory.get() - own->base());
    }
    uint64_t resident_bytes() const {
        struct stat info{};
        ::fstat(fd.get(), &info);
        return static_cast<uint64_t>(info.st_blocks) * 512;
    }
    Descriptor fd;
    std::shared_ptr<OwnHeap> own;
    std::byte* peers;
};

// ---- the allocator

struct Held {
    std::shared_ptr<std::byte> memory;
    uint64_t bytes;
    uint8_t mark;
};
bool overlaps(const Held& a, const Held& b) {
    return a.memory.get() < b.memory.get() + b.bytes && b.memory.get() < a.memory.get() + a.bytes;
}

uint64_t random_bytes(std::mt19937& random) {
    constexpr uint64_t most[] = {1, 64, 200, 4096, 9000, 100'000, 2 * kMiB, 9 * kMiB};
    return random() % (most[random() % std::size(most)] + 1);
}

void check_allocator(Report& report, uint32_t seed) {
    const Heap heap;
    std::mt19937 random(seed);
    std::vector<Held> held;
    for (int step = 0; step < 600; ++step) {
        if (random() % 5 < 2 && !held.empty()) {
            std::swap(held[random() % held.size()], held.back());
            const auto* data = reinterpret_cast<const uint8_t*>(held.back().memory.get());
            const uint64_t bytes = held.back().bytes;
            const bool kept =
                bytes == 0 || (data[0] == held.back().mark && data[bytes - 1] == held.back().mark);
            report.check(kept, "an array keeps its contents");
            held.pop_back();
            continue;
        }
        Held made{nullptr, random_bytes(random), static_cast<uint8_t>(random())};
        made.memory = heap.own->allocate(made.bytes);
        if (!made.memory) continue;
        const auto address = reinterpret_cast<uintptr_t>(made.memory.get());
        const uint64_t unit = made.bytes >= 2 * kMiB ? 2 * kMiB : made.bytes >= 4096 ? 4096 : 64;
        report.check((address - reinterpret_cast<uintptr_t>(heap.own->base())) % unit == 0,
                     "the alignment of " + std::to_string(made.bytes) + " bytes");
        report.check(made.memory.get() >= heap.own->base() &&
                         made.memory.get() + made.bytes <= heap.own->base() + kHeap,
                     "an array is inside the heap");
        report.check(std::none_of(held.begin(), held.end(),
                                  [&](const Held& other) { return overlaps(made, other); }),
                     "arrays do not overlap");
        if (made.bytes > 0) std::memset(made.memory.get(), made.mark, made.bytes);
        held.push_back(std::move(made));
    }
    held.clear();
    report.check(heap.own->used_bytes() == 0, "nothing is in use after all is freed");
    report.check(heap.own->allocate(kHeap) != nullptr, "free ranges unite to the whole heap");
}

void check_limits(Report& report) {
    const Heap heap;
    for (const uint64_t bytes : {kHeap + 1, ~uint64_t{0}, ~uint64_t{0} - 63, uint64_t{1} << 63})
        report.check(heap.own->allocate(bytes) == nullptr, "too long an array is refused");
    auto all = heap.own->allocate(kHeap);
    report.check(all != nullptr && heap.own->allocate(1) == nullptr, "a full heap refuses arrays");
    std::memset(all.get(), 1, 64 * kMiB);
    report.check(heap.resident_bytes() >= 64 * kMiB, "used pages take memory");
    all.reset();
    report.check(heap.resident_bytes() == 0, "pages of a large freed array are given back");
    std::shared_ptr<std::byte> last;
    {
        auto own = std::make_shared<OwnHeap>(heap.fd.get(), kOffset, kHeap);
        last = own->allocate(100);
    }
    std::memset(last.get(), 1, 100);  // the array keeps its heap
}

// ---- detachment

bool is_filled(const std::shared_ptr<std::byte>& memory, uint64_t bytes, uint8_t value) {
    const auto* data = reinterpret_cast<const uint8_t*>(memory.get());
    return std::all_of(data, data + bytes, [=](uint8_t b) { return b == value; });
}

void check_detached(Report& report, uint64_t bytes) {
    const Heap heap;
    // Arrays before and after it in the same pages, and a freed one.
    const auto before = heap.own->allocate(64), array = heap.own->allocate(bytes);
    auto freed = heap.own->allocate(64);
    const auto after = heap.own->allocate(64);
    std::memset(before.get(), 1, 64);
    std::memset(array.get(), 2, bytes);
    std::memset(after.get(), 3, 64);
    freed.reset();
    heap.own->detach(array.get(), bytes);
    const std::string what = " of " + std::to_string(bytes) + " bytes";
    report.check(is_filled(array, bytes, 2), "a detached array keeps its contents" + what);
    report.check(is_filled(before, 64, 1) && is_filled(after, 64, 3), "so do arrays beside it");
    std::memset(heap.at_peer(array), 9, bytes);
    report.check(is_filled(array, bytes, 2), "a late peer cannot change it" + what);
    std::memset(array.get(), 4, bytes);
    report.check(is_filled(array, bytes, 4), "its owner can" + what);
    report.check(std::memcmp(heap.at_peer(array), array.get(), bytes) != 0, "unseen by peers");
}

// Another thread of the owner writes while its array is detached. No write is lost.
void check_writes_during_detach(Report& report) {
    const Heap heap;
    constexpr uint64_t bytes = 8 * kMiB, words = bytes / sizeof(uint64_t);
    const auto array = heap.own->allocate(bytes);
    auto* data = reinterpret_cast<std::atomic<uint64_t>*>(array.get());
    std::atomic<bool> over{false};
    std::atomic<uint64_t> rounds{0};
    std::thread writer([&] {
        std::mt19937_64 random(1);
        std::vector<uint64_t> expected(words, 0);
        while (!over || rounds < 100'000) {
            const uint64_t at = random() % words;
            if (data[at].load(std::memory_order_relaxed) != expected[at]) break;
            data[at].store(expected[at] = random(), std::memory_order_relaxed);
            ++rounds;
        }
        for (uint64_t at = 0; at < words; ++at)
            report.check(data[at].load(std::memory_order_relaxed) == expected[at],
                         "a write during the detachment is kept");
    });
    while (rounds < 1000) std::this_thread::yield();
    heap.own->detach(array.get(), bytes);
    over = true;
    writer.join();
}

// ---- calls

using MakePlan = std::shared_ptr<const Plan> (*)(uint32_t, uint32_t);

struct Job {
    MakePlan plan;
    uint64_t count, block_bytes, seed;
    bool in_place;
};

// One rank of a group with heaps.
struct Member {
    Member(const Descriptor& fd, uint32_t rank)
        : group(std::make_shared<Group>(Descriptor(::dup(fd.get())), rank, World::nonce, 2)),
          rank_(rank_of(group, rank)) {}
    ~Member() { rank_.close(); }
    std::shared_ptr<Group> group;
    Rank rank_;
};

Descriptor segment_of(uint32_t ranks) {
    SegmentShape shape = shape_of(ranks, 2);
    shape.heap_bytes = kHeap;
    return create_segment(shape, World::nonce);
}

// An all_reduce of one rank, with memory in its heap.
class HeapCall {
  public:
    HeapCall(Member& member, const Job& job) : member_(member), job_(job) {
        const uint64_t bytes = job.count * 4;
        in_ = member.group->heap().allocate(bytes);
        out_ = job.in_place ? in_ : member.group->heap().allocate(bytes);
        for (uint64_t i = 0; i < job.count; ++i) data(in_)[i] = value_of(job.seed, rank(), i);
    }
    // `in_heaps`: false if the call puts addresses into its slots instead of offsets.
    Execution execution(bool in_heaps = true) const {
        const auto plan =
            hand::with_readers(rank(), ranks(), [&](uint32_t r) { return job_.plan(r, ranks()); });
        const CallArgs args{OpKind::all_reduce, DType::int32,        ReduceOp::sum, -1,
                            job_.count,         job_.block_bytes + 7};
        Prepared prepared{plan, args,           fingerprint(args),    job_.block_bytes,
                          0,    job_.count * 4, StorePolicy::adaptive};
        if (in_heaps) {
            prepared.heap_form = std::make_shared<HeapForm>(
                HeapForm{plan, prepared.hash, job_.block_bytes, true, true});
        }
        Pieces in, out;
        in.push_back({in_.get(), job_.count * 4});
        out.push_back({out_.get(), job_.count * 4});
        return prepared.bind(std::move(in), std::move(out));
    }
    Outcome run(double timeout_s = kLong_s, bool in_heaps = true) const {
        return outcome_of(
            [&] { member_.rank_.dispatcher->run(execution(in_heaps), timeout_s, {}); });
    }
    bool right() const {
        for (uint64_t i = 0; i < job_.count; ++i) {
            int32_t sum = 0;
            for (uint32_t q = 0; q < ranks(); ++q) sum += value_of(job_.seed, q, i);
            if (data(out_)[i] != sum) return false;
        }
        return true;
    }
    bool untouched() const {
        for (uint64_t i = 0; i < job_.count; ++i) {
            if (data(in_)[i] != value_of(job_.seed, rank(), i)) return false;
        }
        return true;
    }
    uint64_t offset() const { return member_.group->heap().offset_of(in_.get()); }

  private:
    static int32_t* data(const std::shared_ptr<std::byte>& memory) {
        return reinterpret_cast<int32_t*>(memory.get());
    }
    uint32_t rank() const { return member_.rank_.rank; }
    uint32_t ranks() const { return member_.rank_.members->ranks(); }
    Member& member_;
    Job job_;
    std::shared_ptr<std::byte> in_, out_;
};

Job random_job(std::mt19937& random) {
    constexpr MakePlan plans[] = {hand::write_back, hand::star, hand::single_copy};
    constexpr uint64_t counts[] = {1, 15, 1000, 4097, 20'011, 70'000};
    return {plans[random() % 3], counts[random() % std::size(counts)],
            uint64_t{4096} << random() % 8, random(), random() % 2 == 0};
}

bool run_jobs(Member& member, uint32_t seed, int calls) {
    std::mt19937 random(seed);
    for (int i = 0; i < calls; ++i) {
        const Job job = random_job(random);
        const HeapCall call(member, job);
        if (call.run().fault != Fault::none || !call.right()) return false;
        if (!job.in_place && !call.untouched()) return false;
    }
    return true;
}

void check_threads(Report& report, uint32_t ranks, uint32_t seed) {
    const Descriptor fd = segment_of(ranks);
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < ranks; ++r) {
        threads.emplace_back([&, r] {
            Member member(fd, r);
            report.check(run_jobs(member, seed, 25), "calls of ranks that are threads");
        });
    }
    for (std::thread& thread : threads) thread.join();
}

// Both ranks of a group in this thread, of which one never makes its call in time.
void check_late_peer(Report& report, MakePlan plan, uint32_t rank, bool closes) {
    const Descriptor fd = segment_of(2);
    Member first(fd, 0), second(fd, 1);
    Member &early = rank == 0 ? first : second, &late = rank == 0 ? second : first;
    const Job job{plan, 50'000, 1 << 20, 3, true};
    const HeapCall call(early, job);
    const uint64_t offset = call.offset(), bytes = job.count * 4;
    if (closes) {
        const auto work = early.rank_.dispatcher->submit(call.execution(), kLong_s, 0.01, {});
        early.rank_.close();
        report.check(work->done(), "closing ends the call");
    } else {
        report.check(call.run(0.05).fault == Fault::timeout, "the late peer is not awaited");
    }
    std::memset(late.group->heap().at(rank, offset, bytes), 0xee, bytes);
    report.check(call.untouched(),
                 "a late peer does not reach the array of a call that was given up");
    const HeapCall theirs(late, job);
    report.check(theirs.run(1).fault != Fault::none, "the late peer's call fails");
    report.check(outcome_of([&] { static_cast<void>(early.group->heap().allocate(1)); }).fault ==
                     Fault::aborted,
                 "a failed group makes no more shared arrays");
}

// A plan of rank 1, which puts addresses into its slots and then only waits.
std::shared_ptr<const Plan> hostile(uint32_t rank, uint32_t ranks) {
    if (rank == 0) return hand::single_copy(rank, ranks);
    hand::Writer w;
    for (uint32_t part = 0; part < ranks; ++part)
        w.share(hand::slot(rank, part), hand::in(0, part));
    return w.post(1).wait(0, 2).post(3).plan(rank, ranks, 1, 1, ranks, 3, hand::Slots(ranks, ranks),
                                             0, true);
}

void check_hostile_offset(Report& report) {
    const Descriptor fd = segment_of(2);
    std::thread peer([&] {
        Member member(fd, 1);
        const HeapCall call(member, {hostile, 50'000, 1 << 20, 3, false});
        // The hash is that of the call in heaps, but the slots hold addresses.
        static_cast<void>(call.run(5, false));
    });
    Member member(fd, 0);
    const HeapCall call(member, {hand::single_copy, 50'000, 1 << 20, 3, false});
    expect(report, call.run(), Fault::mismatch, "outside of its heap", "a hostile offset");
    peer.join();
    const auto at = [&](uint64_t offset, uint64_t bytes) {
        return outcome_of([&] { static_cast<void>(member.group->heap().at(1, offset, bytes)); });
    };
    for (const uint64_t offset : {kHeap, kHeap - 3, ~uint64_t{0}, ~uint64_t{0} - 7})
        expect(report, at(offset, 4), Fault::mismatch, "outside of its heap", "a hostile offset");
    expect(report, at(8, ~uint64_t{0}), Fault::mismatch, "outside of its heap", "a hostile length");
    report.check(at(kHeap - 4, 4).fault == Fault::none, "the last bytes of a heap");
}

#if !defined(__SANITIZE_THREAD__)
void check_processes(Report& report, uint32_t ranks, uint32_t seed) {
    const Descriptor fd = segment_of(ranks);
    std::vector<pid_t> children;
    for (uint32_t r = 1; r < ranks; ++r) {
        children.push_back(::fork());
        if (children.back() != 0) continue;
        bool right = false;
        {
            Member member(fd, r);
            right = run_jobs(member, seed, 40);
        }
        ::_exit(right ? 0 : 1);
    }
    Member member(fd, 0);
    report.check(run_jobs(member, seed, 40), "calls of ranks that are processes");
    for (const pid_t child : children) {
        int status = 0;
        ::waitpid(child, &status, 0);
        report.check(status == 0, "calls of a child");
    }
}

// A child must not take the pages of its parent, nor wait for a lock of the parent's threads.
void check_fork(Report& report) {
    const Heap heap;
    auto array = heap.own->allocate(64 * kMiB);
    std::memset(array.get(), 5, 64 * kMiB);
    const pid_t child = ::fork();
    if (child == 0) {
        const bool seen = is_filled(array, 100, 5);
        array.reset();
        ::_exit(seen ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    report.check(status == 0 && is_filled(array, 64 * kMiB, 5), "a child frees nothing");
}
#endif

}  // namespace

int main() {
    Report report;
#if !defined(__SANITIZE_THREAD__)
    for (const uint32_t ranks : {2U, 3U}) check_processes(report, ranks, ranks);
    check_fork(report);
#endif
    for (uint32_t seed = 0; seed < 4; ++seed) check_allocator(report, seed);
    check_limits(report);
    for (const uint64_t bytes : {uint64_t{64}, uint64_t{5000}, 3 * kMiB, 70 * kMiB})
        check_detached(report, bytes);
    check_writes_during_detach(report);
    for (const uint32_t ranks : {1U, 2U, 3U, 5U}) check_threads(report, ranks, ranks);
    for (const bool closes : {false, true}) {
        check_late_peer(report, hand::write_back, 0, closes);
        check_late_peer(report, hand::write_back, 1, closes);
        check_late_peer(report, hand::star, 1, closes);
    }
    check_hostile_offset(report);
    return report.finish();
}
