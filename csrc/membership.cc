#include "membership.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "futex.h"

namespace unisono {
namespace {

constexpr size_t kPage = 4096;

// Ranks that are threads of one process share a POSIX lock owner, so the kernel cannot tell them
// apart; this number tells them that they need not ask. The address space is the identity: the
// address of a static is the same in two processes, the pid is the same in two containers.
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

}  // namespace

ForkGuard::ForkGuard() {
    void* page = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) throw_errno("mmap");
    ::madvise(page, kPage, MADV_WIPEONFORK);
    page_ = new (page) std::atomic<uint32_t>(1);
}

ForkGuard::~ForkGuard() {
    ::munmap(page_, kPage);
}

Membership::Membership(Segment& segment, uint32_t rank, const std::array<uint8_t, 16>& nonce)
    : segment_(segment), rank_(rank) {
    if (rank >= ranks()) throw Error(Fault::invalid, "rank is out of the group's range");
    if (!std::equal(nonce.begin(), nonce.end(), segment.group().nonce)) {
        throw Error(
            Fault::invalid,
            "the group's segment does not carry the nonce of its owner: not the same memory");
    }
    RankControl& own = segment_.rank(rank_);
    uint32_t expected = static_cast<uint32_t>(Presence::absent);
    if (!own.presence.compare_exchange_strong(expected, static_cast<uint32_t>(Presence::joined))) {
        throw Error(Fault::invalid,
                    "rank " + std::to_string(rank_) + " has joined this group already");
    }
    lock_own_byte();
    if (!register_for_heavy_barrier()) {
        segment_.group().fences_needed.store(1, std::memory_order_relaxed);
    }
    own.pid.store(::getpid(), std::memory_order_relaxed);
    own.process.store(process_identity(), std::memory_order_release);
}

// A POSIX record lock on byte `rank` of the segment lives exactly as long as the process: the
// kernel drops it however the process ends, children do not inherit it, and pids of other
// containers do not matter. Its one trap: closing any descriptor of the file drops all the
// process's locks on it; see guards_neighbours().
void Membership::lock_own_byte() {
    struct flock lock{};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank_;
    lock.l_len = 1;
    if (::fcntl(segment_.fd(), F_SETLK, &lock) != 0)
        throw_errno("locking this rank's byte of the group's segment");
}

Membership::~Membership() {
    leave();
    if (!guard_.in_child() && guards_neighbours()) segment_.keep_descriptor();
}

// Whether another rank of this process needs its lock still, for ranks of other processes look at
// it.
bool Membership::guards_neighbours() const noexcept {
    const uint64_t own = segment_.rank(rank_).process.load(std::memory_order_relaxed);
    bool neighbours = false, others = false;
    for (uint32_t r = 0; r < ranks(); ++r) {
        const RankControl& other = segment_.rank(r);
        if (other.presence.load(std::memory_order_acquire) !=
            static_cast<uint32_t>(Presence::joined)) {
            continue;
        }
        (other.process.load(std::memory_order_acquire) == own ? neighbours : others) = true;
    }
    return neighbours && others;
}

bool Membership::alive(uint32_t peer) const noexcept {
    const RankControl& other = segment_.rank(peer);
    const uint64_t process = other.process.load(std::memory_order_acquire);
    if (process == 0) return true;  // has not joined yet: rendezvous watches that
    if (process == segment_.rank(rank_).process.load(std::memory_order_relaxed)) return true;
    struct flock lock{};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = peer;
    lock.l_len = 1;
    if (::fcntl(segment_.fd(), F_GETLK, &lock) != 0)
        return true;  // cannot know: the timeout decides
    return lock.l_type != F_UNLCK;
}

void Membership::require_peers_alive() {
    require_healthy();
    for (uint32_t peer = 0; peer < ranks(); ++peer) {
        if (peer == rank_) continue;
        const RankControl& other = segment_.rank(peer);
        if (other.presence.load(std::memory_order_acquire) ==
            static_cast<uint32_t>(Presence::left)) {
            continue;  // it left in good order; who still needs it is told by the wait itself
        }
        if (alive(peer)) continue;
        const int pid = other.pid.load(std::memory_order_relaxed);
        fail(Fault::peer_lost,
             "rank " + std::to_string(peer) + " (pid " + std::to_string(pid) + ") is gone");
    }
}

void Membership::record(Fault fault, const std::string& text) noexcept {
    if (guard_.in_child()) return;
    FaultRecord& failure = segment_.group().failure;
    uint32_t none = 0;
    if (failure.state.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) {
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
    for (uint32_t r = 0; r < ranks(); ++r) {
        ring_always(segment_.rank(r).bell);
        ring_always(segment_.rank(r).mail);
    }
}

void Membership::fail(Fault fault, const std::string& text) {
    record(fault, text);
    raise();
}

void Membership::raise() const {
    if (guard_.in_child()) {
        throw Error(
            Fault::aborted,
            "this communicator belongs to the parent process: a forked child cannot use it");
    }
    if (closed_.load(std::memory_order_relaxed))
        throw Error(Fault::aborted, "this communicator is closed");
    const FaultRecord& failure = segment_.group().failure;
    // The writer may have been killed between the two states; then the kind is all there is.
    for (int i = 0; i < 1000 && failure.state.load(std::memory_order_acquire) != 2; ++i)
        ::usleep(100);
    if (failure.state.load(std::memory_order_acquire) != 2)
        throw Error(Fault::aborted, "the group has failed");
    throw Error(static_cast<Fault>(failure.fault.load(std::memory_order_relaxed)),
                std::string(failure.text, ::strnlen(failure.text, kFaultText)));
}

void Membership::leave() noexcept {
    if (guard_.in_child() || closed_.exchange(true)) return;
    RankControl& own = segment_.rank(rank_);
    own.presence.store(static_cast<uint32_t>(Presence::left), std::memory_order_release);
    for (uint32_t r = 0; r < ranks(); ++r) {  // those who wait for this rank look again, and see
        ring_always(segment_.rank(r).bell);
        ring_always(segment_.rank(r).mail);
    }
}

}  // namespace unisono
