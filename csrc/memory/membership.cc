#include "memory/membership.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "core/futex.h"
#include "memory/peer_checks.h"

namespace unisono {
namespace {

constexpr size_t kPage = 4096;
// The cause of a lost connection is looked for 100 times, 1 ms apart.
constexpr int kLooksForCause = 100;
constexpr useconds_t kBetweenLooks_us = 1000;

const Error kNoReason(
    Fault::aborted,
    "the group has failed, and the rank that failed it ended before it gave a reason"),
    kUnreadable(Fault::aborted, "the group has failed, and there is no memory to read the reason");

// Returns a number that identifies this process. Ranks that are threads of one process share a
// POSIX lock owner, so the kernel cannot tell them apart. Such ranks recognise each other by this
// number and skip the query. It mixes a start time, an address and the pid, because two processes
// may have the same address, and two containers the same pid.
uint64_t process_identity() {
    static const char anchor = 0;
    timespec now{};
    ::clock_gettime(CLOCK_BOOTTIME, &now);
    static const uint64_t started =
        static_cast<uint64_t>(now.tv_sec) * 1000000007ULL + static_cast<uint64_t>(now.tv_nsec);
    return (started ^ reinterpret_cast<uintptr_t>(&anchor) ^
            (static_cast<uint64_t>(::getpid()) << 40)) |
           1;
}

// Asks the kernel, whose answer does not depend on /proc.
bool is_gone(pid_t pid) noexcept {
    return ::kill(pid, 0) != 0 && errno == ESRCH;
}

// Returns false if a thread of a process is certainly stopped or gone. A thread that runs may be in
// the middle of a system call. `tasks` is the folder of the process's threads.
bool may_run_task(int tasks, const char* name) noexcept {
    std::array<char, 512> stat;
    std::snprintf(stat.data(), stat.size(), "%s/stat", name);
    const int opened = ::openat(tasks, stat.data(), O_RDONLY | O_CLOEXEC);
    if (opened < 0) return errno != ENOENT && errno != ESRCH;
    const Descriptor file(opened);
    const ssize_t got = ::read(opened, stat.data(), stat.size() - 1);
    if (got <= 0) return got < 0 && errno != ESRCH;
    stat[static_cast<size_t>(got)] = 0;
    const char* const name_end = std::strrchr(stat.data(), ')');
    // T, t: stopped. Z, X, x: ended.
    return !name_end || !name_end[1] || !std::strchr("TtZXx", name_end[2]);
}

}  // namespace

ForkGuard::ForkGuard() {
    void* page = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) throw_errno("mmap of the page that detects a fork");
    ::madvise(page, kPage, MADV_WIPEONFORK);
    page_ = new (page) std::atomic<uint32_t>(1);
}

ForkGuard::~ForkGuard() {
    ::munmap(page_, kPage);
}

Membership::Membership(View& view, const std::array<uint8_t, 16>& nonce) : view_(view) {
    if (!std::equal(nonce.begin(), nonce.end(), segment().group().nonce)) {
        throw Error(Fault::invalid,
                    "expected the nonce of the group's owner in the segment, found another: it is "
                    "other memory");
    }
    RankControl& own = view_.own();
    uint32_t expected = static_cast<uint32_t>(Presence::absent);
    if (!own.presence.compare_exchange_strong(expected, static_cast<uint32_t>(Presence::joining))) {
        throw Error(Fault::invalid, "rank " + std::to_string(rank()) +
                                        " has already joined this group: each rank joins once");
    }
    own.pid.store(::getpid(), std::memory_order_relaxed);
    own.process.store(process_identity(), std::memory_order_relaxed);
    try {
        lock_own_byte();
    } catch (...) {
        own.presence.store(static_cast<uint32_t>(Presence::absent), std::memory_order_release);
        throw;
    }
    if (!register_for_heavy_barrier()) {
        segment().group().fences_needed.store(1, std::memory_order_relaxed);
    }
    own.presence.store(static_cast<uint32_t>(Presence::joined), std::memory_order_release);
}

// Locks one byte of the segment's file: the byte whose offset is this rank's place in the segment.
// This POSIX record lock lives exactly as long as the process. The kernel drops it when the process
// ends for any reason, and children do not inherit it. Unlike a pid, a lock has the same meaning in
// all containers. One hazard: if a process closes any descriptor of the file, it loses all its
// locks on the file; see close_descriptor().
void Membership::lock_own_byte() {
    struct flock lock{};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = view_.place(rank());
    lock.l_len = 1;
    if (::fcntl(segment().fd(), F_SETLK, &lock) != 0)
        throw_errno("locking this rank's byte of the group's segment");
}

Membership::~Membership() {
    leave();
    if (!guard_.in_child()) close_descriptor();
}

void Membership::give_back() noexcept {
    const std::lock_guard lock(release_mutex_);
    if (std::exchange(given_back_, true)) return;
    // The descriptor is closed before the memory is released, because close_descriptor() finds the
    // other ranks of this process in the memory.
    close_descriptor();
    view_.give_back();
}

// Closes the descriptor, unless another rank of this process still needs its lock. The last such
// rank closes all descriptors that were left open. Each rank first leaves and publishes its
// descriptor, then checks for other ranks, in sequentially consistent order. So if two ranks leave
// at the same time, at least one of them sees that both have left.
void Membership::close_descriptor() noexcept {
    RankControl& own = view_.own();
    const int fd = segment().release_descriptor();
    struct stat file{};
    if (fd < 0 || ::fstat(fd, &file) != 0) return;
    own.kept_fd.store(fd + 1);
    if (has_process_peers()) return;
    const uint64_t process = own.process.load(std::memory_order_relaxed);
    for (const uint32_t r : view_.here()) {
        RankControl& other = view_.control(r);
        if (other.process.load(std::memory_order_relaxed) != process) continue;
        const int kept = other.kept_fd.exchange(0) - 1;
        struct stat found{};  // checked below, because other processes can write to that word
        if (kept >= 0 && ::fstat(kept, &found) == 0 && found.st_dev == file.st_dev &&
            found.st_ino == file.st_ino) {
            ::close(kept);
        }
    }
}

// Returns true if another rank of this process is in the group or is joining. A joining rank may
// not have published its process yet.
bool Membership::has_process_peers() const noexcept {
    const uint64_t own = view_.own().process.load(std::memory_order_relaxed);
    const auto& here = view_.here();
    return std::any_of(here.begin(), here.end(), [&](uint32_t r) {
        const auto presence = static_cast<Presence>(view_.control(r).presence.load());
        if (presence != Presence::joined && presence != Presence::joining) return false;
        const uint64_t process = view_.control(r).process.load(std::memory_order_relaxed);
        return process == own || process == 0;
    });
}

bool Membership::alive(uint32_t peer) const noexcept {
    const RankControl& other = view_.control(peer);
    const auto joined = [&] {
        return other.presence.load(std::memory_order_acquire) ==
               static_cast<uint32_t>(Presence::joined);
    };
    // A rank that has not joined or has left counts as alive here, because its loss is detected
    // elsewhere: the bootstrap watches a rank that is joining, and each wait for a rank checks if
    // that rank has left.
    if (!joined()) return true;
    if (other.process.load(std::memory_order_relaxed) ==
        view_.own().process.load(std::memory_order_relaxed)) {
        return true;
    }
    struct flock lock{};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = view_.place(peer);
    lock.l_len = 1;
    // If the query fails, the liveness is unknown, and the timeout of the wait decides.
    if (::fcntl(segment().fd(), F_GETLK, &lock) != 0) return true;
    // After this rank has left, the descriptor number may belong to another file.
    return lock.l_type != F_UNLCK || !joined() || closed_.load();
}

bool Membership::may_run(uint32_t peer) const noexcept {
    if (view_.control(peer).process.load(std::memory_order_acquire) ==
        view_.own().process.load(std::memory_order_relaxed))
        return true;
    const pid_t pid = view_.control(peer).pid.load(std::memory_order_relaxed);
    std::array<char, 64> path;
    std::snprintf(path.data(), path.size(), "/proc/%d/task", pid);
    const std::unique_ptr<DIR, int (*)(DIR*)> tasks(::opendir(path.data()), ::closedir);
    // This may fail for a process that runs: no descriptor or memory is free, or /proc shows other
    // processes only.
    if (!tasks) return !is_gone(pid);
    for (;;) {
        errno = 0;
        const dirent* const task = ::readdir(tasks.get());
        if (!task) return errno != 0 && !is_gone(pid);
        if (task->d_name[0] != '.' && may_run_task(::dirfd(tasks.get()), task->d_name)) return true;
    }
}

bool Membership::present(uint32_t peer) const {
    if (closed_.load(std::memory_order_relaxed) || guard_.in_child()) raise();
    if (peer >= ranks()) {
        throw Error(Fault::invalid, "expected a rank from 0 to " + std::to_string(ranks() - 1) +
                                        ", got " + std::to_string(peer));
    }
    return alive(peer) && !view_.has_left(peer);
}

uint64_t Membership::exchange_successor(uint64_t expected, uint64_t desired) {
    if (guard_.in_child()) raise();
    // Without the lock, give_back() could run at the same time, and the exchange would change
    // memory that no other rank sees.
    const std::lock_guard lock(release_mutex_);
    if (given_back_ && expected != desired) raise();
    segment().group().successor.compare_exchange_strong(expected, desired,
                                                        std::memory_order_acq_rel);
    return expected;
}

void Membership::require_peers_alive() {
    require_healthy();
    for (const uint32_t peer : view_.here()) require_alive(peer);
}

void Membership::require_due_peers_alive() {
    require_healthy();
    const auto& here = view_.here();
    const auto ranks = static_cast<uint32_t>(here.size());
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    const auto now_us = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
    const PeersDue due = take_due(segment().group().turn, ranks, static_cast<uint32_t>(now_us));
    for (uint32_t i = 0; i < due.count; ++i) require_alive(here[(due.first + i) % ranks]);
}

void Membership::require_alive(uint32_t peer) {
    if (alive(peer)) return;
    const int pid = view_.control(peer).pid.load(std::memory_order_relaxed);
    fail(Fault::peer_lost,
         "rank " + std::to_string(peer) + " (pid " + std::to_string(pid) + ") is gone");
}

void Membership::record(Fault fault, std::string_view text) noexcept {
    if (guard_.in_child()) return;
    if (fault == Fault::interrupted) fault = Fault::aborted;  // only this rank was interrupted
    FaultRecord& failure = segment().group().failure;
    uint32_t none = 0;
    const bool first = failure.state.compare_exchange_strong(none, 1, std::memory_order_acq_rel);
    // After this, the caller may reuse the memory of its failed calls. A peer that reads the new
    // content must find the failure. The exchange alone does not order its store before later
    // stores.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (first) {
        size_t length = std::min(text.size(), kFaultText - 1);
        const auto splits_character = [&] {
            return length < text.size() && (text[length] & 0xc0) == 0x80;
        };
        while (length > 0 && splits_character()) --length;
        std::memcpy(failure.text, text.data(), length);
        failure.text[length] = '\0';
        failure.fault.store(static_cast<uint32_t>(fault), std::memory_order_relaxed);
        failure.state.store(2, std::memory_order_release);
    }
    events_.raise(Event::failed);
    wake_all();
}

void Membership::wake_all() noexcept {
    // Includes the doorbells in the mirrors of remote ranks, on which only threads of this rank
    // sleep.
    for (uint32_t r = 0; r < ranks(); ++r) {
        ring_always(view_.control(r).doorbell);
        ring_always(view_.control(r).p2p);
    }
}

void Membership::fail(Fault fault, const std::string& text) {
    record(fault, text);
    raise();
}

// A rank that has failed closes its connections, and tells the cause on another connection. So this
// waits a moment for the cause.
void Membership::fail_gone(uint32_t rank, const std::string& why) {
    for (int look = 0; look < kLooksForCause && !failed(); ++look) ::usleep(kBetweenLooks_us);
    fail(Fault::peer_lost, "rank " + std::to_string(rank) + " is gone: " + why);
}

void Membership::fail_nonsense(uint32_t rank, const std::string& what) {
    fail(Fault::system, "rank " + std::to_string(rank) + " sent " + what);
}

void Membership::raise() const {
    if (guard_.in_child()) {
        throw Error(
            Fault::aborted,
            "this communicator belongs to the parent process: a forked child cannot use it");
    }
    if (closed_.load(std::memory_order_relaxed))
        throw Error(Fault::aborted, "this communicator is closed");
    throw failure().value_or(Error(Fault::aborted, "the group has failed"));
}

std::optional<Error> Membership::failure() const noexcept {
    const FaultRecord& failure = segment().group().failure;
    if (!failed()) return std::nullopt;
    // Waits until the failure is written, but not without end: the writer may have been killed
    // between the states 1 (being written) and 2 (readable).
    for (int i = 0; i < 1000 && failure.state.load(std::memory_order_acquire) != 2; ++i)
        ::usleep(100);
    if (failure.state.load(std::memory_order_acquire) != 2) return kNoReason;
    try {
        return Error(static_cast<Fault>(failure.fault.load(std::memory_order_relaxed)),
                     std::string(failure.text, ::strnlen(failure.text, kFaultText)));
    } catch (const std::bad_alloc&) {
        return kUnreadable;
    }
}

void Membership::leave() noexcept {
    if (guard_.in_child() || closed_.exchange(true)) return;
    view_.own().presence.store(static_cast<uint32_t>(Presence::left));
    wake_all();  // ranks that wait for this rank check again and see that it has left
}

}  // namespace unisono
