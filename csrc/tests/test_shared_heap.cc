// Tests of shared heaps: their allocator, and the detachment of arrays.
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <random>
#include <thread>

#include "tests/heap_calls.h"
#include "tests/report.h"

namespace {

using namespace unisono;
using namespace unisono::test;

constexpr uint64_t kOffset = 4 * kMiB;

// A heap in a file, and a mapping of the same memory as a peer has it.
struct Heap {
    Heap() : fd(::memfd_create("heap", MFD_CLOEXEC)) {
        if (::ftruncate(fd.get(), kOffset + kHeap) != 0) std::abort();
        own = std::make_shared<OwnHeap>(fd.get(), kOffset, kHeap, false);
        void* base = ::mmap(nullptr, kHeap, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), kOffset);
        peers = static_cast<std::byte*>(base);
    }
    ~Heap() { ::munmap(peers, kHeap); }
    uint64_t offset_of(const std::shared_ptr<std::byte>& memory) const {
        return static_cast<uint64_t>(memory.get() - own->base());
    }
    std::byte* at_peer(const std::shared_ptr<std::byte>& memory) const {
        return peers + offset_of(memory);
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
        auto own = std::make_shared<OwnHeap>(heap.fd.get(), kOffset, kHeap, false);
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
    heap.own->detach(heap.offset_of(array), bytes);
    const std::string what = " of " + std::to_string(bytes) + " bytes";
    report.check(is_filled(array, bytes, 2), "a detached array keeps its contents" + what);
    report.check(is_filled(before, 64, 1) && is_filled(after, 64, 3), "so do arrays beside it");
    std::memset(heap.at_peer(array), 9, bytes);
    report.check(is_filled(array, bytes, 2), "a late peer cannot change it" + what);
    std::memset(array.get(), 4, bytes);
    report.check(is_filled(array, bytes, 4), "its owner can" + what);
    report.check(std::memcmp(heap.at_peer(array), array.get(), bytes) != 0, "unseen by peers");
}

#if !defined(__SANITIZE_THREAD__)
// Another thread of the owner writes while its array is detached. No write is lost. The thread
// sanitizer takes the mapping of pages for a write to them.
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
    heap.own->detach(heap.offset_of(array), bytes);
    over = true;
    writer.join();
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
    check_fork(report);
    check_writes_during_detach(report);
#endif
    for (uint32_t seed = 0; seed < 4; ++seed) check_allocator(report, seed);
    check_limits(report);
    for (const uint64_t bytes : {uint64_t{64}, uint64_t{5000}, 3 * kMiB, 70 * kMiB})
        check_detached(report, bytes);
    return report.finish();
}
