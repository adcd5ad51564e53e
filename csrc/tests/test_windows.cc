// Tests of windows: puts, gets, signals, bounds, and failures. Ranks are threads and, except under
// a thread sanitizer, processes.
#include <sys/wait.h>

#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "one_sided/window.h"
#include "tests/heap_calls.h"
#include "tests/host_groups.h"
#include "tests/report.h"

namespace {

using namespace unisono;
using namespace unisono::test;

constexpr uint64_t kArrayBytes = 300'000;

// A rank's window. All ranks allocate alike, so the parts of all ranks are known without a call,
// and the first memory of a heap is zero.
struct Opened {
    Opened(Group& group, uint64_t bytes = kArrayBytes) : group(group) {
        SharedHeap& heap = group.heap();
        const uint32_t ranks = group.members().ranks();
        array = heap.allocate(bytes);
        const uint64_t signal_bytes = Window::signal_bytes(ranks);
        signals = heap.allocate(signal_bytes);
        part = {heap.offset_of(array.get()), bytes, heap.offset_of(signals.get()), 1};
        own = std::make_unique<OwnPart>(group, HeapRange{part.array, bytes},
                                        HeapRange{part.signals, signal_bytes});
        window = std::make_unique<Window>(group, std::vector<Window::Part>(ranks, part), 4);
    }
    void put(uint32_t rank, uint64_t at, const std::byte* from, uint64_t bytes) {
        window->put(rank, at, from, bytes, patience);
    }
    void get(uint32_t rank, uint64_t at, std::byte* to, uint64_t bytes) {
        window->get(rank, at, to, bytes, patience);
    }
    Group& group;
    std::shared_ptr<std::byte> array, signals;
    Window::Part part;
    std::unique_ptr<OwnPart> own;
    std::unique_ptr<Window> window;
    RemoteWait patience{kLong_s, {}};
};

std::byte byte_of(uint64_t round, uint32_t rank, uint64_t i) {
    return static_cast<std::byte>(value_of(round, rank, i));
}

// Every rank puts a part into the array of each peer, and signals. After its waits it checks what
// the peers put, and reads it back from them. A second signal allows the next round.
bool exchange_parts(Opened& opened, uint32_t rank, uint32_t ranks, int rounds) {
    Window& window = *opened.window;
    std::mt19937 random(rank);
    for (int round = 0; round < rounds; ++round) {
        const uint64_t part = kArrayBytes / ranks;
        std::vector<std::byte> sent(part), read(part);
        for (uint64_t i = 0; i < part; ++i)
            sent[i] = byte_of(static_cast<uint64_t>(round), rank, i);
        for (uint32_t step = 1; step <= ranks; ++step) {
            const uint32_t peer = (rank + step) % ranks;
            const uint64_t cut = random() % (part + 1);  // in two puts
            opened.put(peer, rank * part, sent.data(), cut);
            opened.put(peer, rank * part + cut, sent.data() + cut, part - cut);
            window.signal(peer);
        }
        for (uint32_t peer = 0; peer < ranks; ++peer) window.wait(peer, 1, kLong_s, {});
        for (uint32_t peer = 0; peer < ranks; ++peer) {
            for (uint64_t i = 0; i < part; ++i) {
                if (opened.array.get()[peer * part + i] !=
                    byte_of(static_cast<uint64_t>(round), peer, i))
                    return false;
            }
            opened.get(peer, rank * part, read.data(), part);
            if (read != sent) return false;
        }
        for (uint32_t peer = 0; peer < ranks; ++peer) window.signal(peer);
        for (uint32_t peer = 0; peer < ranks; ++peer) window.wait(peer, 1, kLong_s, {});
    }
    return true;
}

template <class Body>
void on_threads(uint32_t ranks, Body&& body) {
    const Descriptor fd = segment_of(ranks);
    std::vector<std::unique_ptr<Member>> members;
    std::vector<std::unique_ptr<Opened>> windows;
    for (uint32_t r = 0; r < ranks; ++r) {
        members.push_back(std::make_unique<Member>(fd, r));
        windows.push_back(std::make_unique<Opened>(*members.back()->group));
    }
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < ranks; ++r) threads.emplace_back([&, r] { body(*windows[r], r); });
    for (std::thread& thread : threads) thread.join();
    windows.clear();
}

void check_exchanges(Report& report) {
    for (const uint32_t ranks : {1U, 2U, 3U, 5U}) {
        on_threads(ranks, [&](Opened& opened, uint32_t rank) {
            report.check(exchange_parts(opened, rank, ranks, 20), "parts of ranks as threads");
        });
    }
}

// Several threads of a rank add signals, and several threads of the other take them.
void check_threads_of_a_rank(Report& report) {
    constexpr int kEach = 2000, kThreads = 3;
    on_threads(2, [&](Opened& opened, uint32_t rank) {
        std::vector<std::thread> threads;
        for (int t = 0; t < kThreads; ++t) {
            threads.emplace_back([&] {
                for (int i = 0; i < kEach; ++i) {
                    if (rank == 0) {
                        opened.window->signal(1);
                    } else {
                        opened.window->wait(0, 1, kLong_s, {});
                    }
                }
            });
        }
        for (std::thread& thread : threads) thread.join();
        if (rank == 1) report.check(opened.window->arrived(0) == 0, "all signals are taken");
    });
}

void check_counts(Report& report) {
    on_threads(2, [&](Opened& opened, uint32_t rank) {
        Window& window = *opened.window;
        if (rank == 0) {
            for (int i = 0; i < 5; ++i) window.signal(1);
            window.wait(1, 1, kLong_s, {});
            const OperationCounters& counters = opened.group.counters();
            report.check(counters.row(kSignalRow).calls == 5, "signals are counted");
            report.check(counters.row(kWaitRow).calls == 1, "waits are counted");
        } else {
            window.wait(0, 3, kLong_s, {});
            window.wait(0, 0, kLong_s, {});
            window.wait(0, 2, kLong_s, {});
            report.check(window.arrived(0) == 0, "five signals are taken");
            window.signal(0);
        }
    });
}

void check_refusals(Report& report) {
    const Descriptor fd = segment_of(2);
    Member member(fd, 0), peer(fd, 1);
    Opened own(*member.group), theirs(*peer.group);
    std::array<std::byte, 8> bytes{};
    const auto put = [&](uint32_t rank, uint64_t at, uint64_t count) {
        return outcome_of([&] { own.put(rank, at, bytes.data(), count); });
    };
    expect(report, put(2, 0, 4), Fault::invalid, "rank 2 is not one of the 2 ranks", "a rank");
    for (const uint64_t at : {kArrayBytes - 4, kArrayBytes + 4, ~uint64_t{0} - 3})
        expect(report, put(1, at, 8), Fault::invalid, "outside of the array of rank 1", "a range");
    expect(report, put(1, kArrayBytes - 4, 8), Fault::invalid,
           "put: 2 elements from element 74999 on are outside of the array of rank 1, which has "
           "75000 elements",
           "a text");
    report.check(put(1, kArrayBytes - 8, 8).fault == Fault::none, "the last elements");
    report.check(put(1, kArrayBytes, 0).fault == Fault::none, "nothing at the end");
    const auto get = [&] { own.get(1, kArrayBytes, bytes.data(), 1); };
    expect(report, outcome_of(get), Fault::invalid, "get: ", "a range of a get");
    // A peer that says that its array is where no heap is.
    for (const Window::Part& part :
         {Window::Part{kHeap - 4, 8, 0, 1}, Window::Part{0, 8, kHeap, 1}}) {
        const auto open = [&] { Window(*member.group, {own.part, part}, 4); };
        expect(report, outcome_of(open), Fault::mismatch, "outside of its heap", "a hostile part");
    }
}

// A wait that ends by its timeout. The peer, which was late, does not reach the array any more, and
// finds the failure.
void check_late_signal(Report& report) {
    const Descriptor fd = segment_of(2);
    Member early(fd, 0), late(fd, 1);
    Opened own(*early.group), theirs(*late.group);
    std::byte* const reached =
        late.group->heap().at(0, early.group->heap().offset_of(own.array.get()), kArrayBytes);
    std::memset(own.array.get(), 0x11, kArrayBytes);
    theirs.window->signal(0);
    const auto wait = [&] { own.window->wait(1, 2, 0.05, {}); };
    expect(report, outcome_of(wait), Fault::timeout, "1 signal arrived; rank 1: ", "a late signal");
    std::memset(reached, 0xee, kArrayBytes);
    report.check(std::all_of(own.array.get(), own.array.get() + kArrayBytes,
                             [](std::byte b) { return b == std::byte{0x11}; }),
                 "a late peer does not reach the array");
    std::byte one{};
    report.check(outcome_of([&] { theirs.put(0, 0, &one, 1); }).fault == Fault::timeout,
                 "the late peer finds the failure");
    std::memset(own.array.get(), 0x22, kArrayBytes);
    report.check(outcome_of(wait).fault == Fault::timeout, "a second wait finds the failure");
    report.check(own.array.get()[kArrayBytes - 1] == std::byte{0x22},
                 "what the program wrote after the failure stays");
}

// A failure that a collective finds detaches the arrays of windows, too.
void check_failed_call(Report& report) {
    const Descriptor fd = segment_of(2);
    Member early(fd, 0), late(fd, 1);
    Opened own(*early.group), theirs(*late.group);
    std::memset(own.array.get(), 0x11, kArrayBytes);
    const uint64_t offset = early.group->heap().offset_of(own.array.get());
    const HeapCall call(early, {hand::write_back, 50'000, 1 << 20, 3, true});
    report.check(call.run(0.05).fault == Fault::timeout, "the late peer is not awaited");
    std::byte* const reached = late.group->heap().at(0, offset, 1);
    *reached = std::byte{0xee};
    report.check(own.array.get()[0] == std::byte{0x11}, "the array of the window is detached");
}

void check_departure(Report& report) {
    const Descriptor fd = segment_of(2);
    Member member(fd, 0);
    {
        Member peer(fd, 1);
        Opened own(*member.group), theirs(*peer.group);
        theirs.window->signal(0);
        theirs.window.reset();
        theirs.own.reset();
        peer.rank_.close();
        own.window->wait(1, 1, kLong_s, {});  // it was sent before
        const auto wait = [&] { own.window->wait(1, 1, kLong_s, {}); };
        expect(report, outcome_of(wait), Fault::peer_lost, "left the group while rank 0 waited",
               "a departure");
    }
}

// ---- ranks of several hosts

constexpr uint64_t kHostHeap = 64 << 20;

// Runs `body(opened, rank)` on ranks of these hosts.
template <class Body>
void on_hosts(const Layout& layout, Body&& body) {
    Hosts hosts(layout, 2, 1 << 16, 2, 2, kHostHeap);
    uint32_t ranks = 0;
    for (const auto& here : layout) ranks += static_cast<uint32_t>(here.size());
    std::vector<std::unique_ptr<Opened>> windows;
    for (uint32_t r = 0; r < ranks; ++r)
        windows.push_back(std::make_unique<Opened>(hosts.group(r)));
    hosts.run([&](Rank& rank) { body(*windows[rank.rank], rank.rank, ranks); });
}

void check_hosts(Report& report) {
    for (const Layout& layout : {Layout{{0}, {1}}, Layout{{0, 2}, {1}}, Layout{{3, 0}, {1, 2}}}) {
        on_hosts(layout, [&](Opened& opened, uint32_t rank, uint32_t ranks) {
            report.check(exchange_parts(opened, rank, ranks, 20), "parts of ranks of hosts");
        });
    }
}

// A rank that makes no call serves puts and gets. A fence waits for the answer of that rank.
void check_passive_rank(Report& report) {
    std::atomic<bool> over{false};
    on_hosts({{0}, {1}}, [&](Opened& opened, uint32_t rank, uint32_t) {
        if (rank == 1) {  // makes no call: its progress thread serves the other rank
            while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            return;
        }
        std::vector<std::byte> sent(kArrayBytes, std::byte{7}), read(kArrayBytes);
        opened.put(1, 0, sent.data(), kArrayBytes);
        opened.window->fence(opened.patience);
        opened.get(1, 0, read.data(), kArrayBytes);
        report.check(read == sent, "a put and a get without a call of the owner");
        over = true;
    });
}

// Several threads of a rank use a window of another host at the same time.
void check_threads_between_hosts(Report& report) {
    constexpr uint64_t kThreads = 3, kPart = 40'000;
    on_hosts({{0}, {1}}, [&](Opened& opened, uint32_t rank, uint32_t) {
        std::vector<std::thread> threads;
        for (uint64_t t = 0; t < kThreads; ++t) {
            threads.emplace_back([&, t] {
                std::vector<std::byte> part(kPart), read(kPart);
                for (int round = 0; round < 50; ++round) {
                    std::fill(part.begin(), part.end(), static_cast<std::byte>(round + rank));
                    opened.put(1 - rank, t * kPart, part.data(), kPart);
                    opened.get(1 - rank, t * kPart, read.data(), kPart);
                    report.check(read == part, "a thread reads what it has put");
                    opened.window->signal(1 - rank);
                }
                for (int round = 0; round < 50; ++round)
                    opened.window->wait(1 - rank, 1, kLong_s, {});
            });
        }
        for (std::thread& thread : threads) thread.join();
        report.check(opened.window->arrived(1 - rank) == 0, "all signals are taken");
    });
}

#if !defined(__SANITIZE_THREAD__)
// After its fence, each of several threads finds its put in the array of the other host. The ranks
// are threads of this process, so a thread can look at the array directly; the sanitizer does not
// see that the connection orders this access.
void check_fences_of_threads(Report& report) {
    constexpr uint64_t kThreads = 4, kPart = 20'000;
    Hosts hosts({{0}, {1}}, 1, 1 << 16, 2, 2, kHostHeap);
    Opened here(hosts.group(0)), there(hosts.group(1));
    std::vector<std::thread> threads;
    for (uint64_t t = 0; t < kThreads; ++t) {
        threads.emplace_back([&, t] {
            std::vector<std::byte> part(kPart);
            RemoteWait patience{kLong_s, {}};
            for (int round = 0; round < 200; ++round) {
                std::fill(part.begin(), part.end(), static_cast<std::byte>(round + 1));
                here.window->put(1, t * kPart, part.data(), kPart, patience);
                here.window->fence(patience);
                report.check(std::memcmp(there.array.get() + t * kPart, part.data(), kPart) == 0,
                             "a fence completes the puts of its thread");
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}
#endif

void check_failures_between_hosts(Report& report) {
    on_hosts({{0}, {1}}, [&](Opened& opened, uint32_t rank, uint32_t) {
        if (rank == 1) return;
        std::byte one{};
        expect(report, outcome_of([&] { opened.put(1, kArrayBytes, &one, 1); }), Fault::invalid,
               "outside of the array of rank 1", "a range on another host");
        const auto wait = [&] { opened.window->wait(1, 1, 0.05, {}); };
        expect(report, outcome_of(wait), Fault::timeout,
               "0 signals arrived; rank 1: ", "a late signal of another host");
        report.check(outcome_of([&] { opened.put(1, 0, &one, 1); }).fault == Fault::timeout,
                     "a put finds the failure");
    });
}

void check_departure_between_hosts(Report& report) {
    on_hosts({{0}, {1}}, [&](Opened& opened, uint32_t rank, uint32_t) {
        if (rank == 1) {
            opened.window->signal(0);
            opened.window.reset();
            opened.own.reset();
            opened.group.close();
            return;
        }
        opened.window->wait(1, 1, kLong_s, {});  // it was sent before
        const auto wait = [&] { opened.window->wait(1, 1, kLong_s, {}); };
        expect(report, outcome_of(wait), Fault::peer_lost, "left the group while rank 0 waited",
               "a departure from another host");
    });
}

#if !defined(__SANITIZE_THREAD__)
void check_processes(Report& report, uint32_t ranks) {
    const Descriptor fd = segment_of(ranks);
    std::vector<pid_t> children;
    const auto run = [&](uint32_t r) {
        Member member(fd, r);
        Opened opened(*member.group);
        return exchange_parts(opened, r, ranks, 50);
    };
    for (uint32_t r = 1; r < ranks; ++r) {
        children.push_back(::fork());
        if (children.back() == 0) ::_exit(run(r) ? 0 : 1);
    }
    report.check(run(0), "parts of ranks as processes");
    for (const pid_t child : children) {
        int status = 0;
        ::waitpid(child, &status, 0);
        report.check(status == 0, "parts of a child");
    }
}
#endif

}  // namespace

int main() {
    Report report;
#if !defined(__SANITIZE_THREAD__)
    for (const uint32_t ranks : {2U, 3U}) check_processes(report, ranks);
#endif
    check_exchanges(report);
    check_threads_of_a_rank(report);
    check_counts(report);
    check_refusals(report);
    check_late_signal(report);
    check_failed_call(report);
    check_departure(report);
    check_hosts(report);
    check_passive_rank(report);
    check_threads_between_hosts(report);
#if !defined(__SANITIZE_THREAD__)
    check_fences_of_threads(report);
#endif
    check_failures_between_hosts(report);
    check_departure_between_hosts(report);
    return report.finish();
}
