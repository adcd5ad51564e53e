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
    if (page == MAP_FAILED)
        throw_errno("mmap of the page that tells a forked child from its parent");
    ::madvise(page, kPage, MADV_WIPEONFORK);
    page_ = new (page) std::atomic<uint32_t>(1);
}

ForkGuard::~ForkGuard() {
    ::munmap(page_, kPage);
}

Membership::Membership(View& view, const std::array<uint8_t, 16>& nonce) : view_(view) {
    if (!std::equal(nonce.begin(), nonce.end(), segment().group().nonce)) {
        throw Error(
            Fault::invalid,
            "the group's segment does not carry the nonce of its owner: it is other memory");
    }
    RankControl& own = view_.own();
    uint32_t expected = static_cast<uint32_t>(Presence::absent);
    if (!own.presence.compare_exchange_strong(expected, static_cast<uint32_t>(Presence::joined))) {
        throw Error(Fault::invalid, "rank " + std::to_string(rank()) +
                                        " has joined this group already: each joins once");
    }
    lock_own_byte();
    if (!register_for_heavy_barrier()) {
        segment().group().fences_needed.store(1, std::memory_order_relaxed);
    }
    own.pid.store(::getpid(), std::memory_order_relaxed);
    own.process.store(process_identity(), std::memory_order_release);
}

// A POSIX record lock on the byte of the rank's place in the segment lives exactly as long as the
// process: the kernel drops it however the process ends, children do not inherit it, and pids of
// other containers do not matter. Its one trap: closing any descriptor of the file drops all the
// process's locks on it; see guards_neighbours().
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
    if (!guard_.in_child() && guards_neighbours()) segment().keep_descriptor();
}

bool Membership::guards_neighbours() const noexcept {
    const uint64_t own = view_.own().process.load(std::memory_order_relaxed);
    bool neighbours = false, others = false;
    for (const uint32_t r : view_.here()) {
        const RankControl& other = view_.control(r);
        if (other.presence.load(std::memory_order_acquire) !=
            static_cast<uint32_t>(Presence::joined)) {
            continue;
        }
        (other.process.load(std::memory_order_acquire) == own ? neighbours : others) = true;
    }
    return neighbours && others;
}

bool Membership::alive(uint32_t peer) const noexcept {
    const RankControl& other = view_.control(peer);
    const uint64_t process = other.process.load(std::memory_order_acquire);
    if (process == 0) return true;  // has not joined yet: rendezvous watches that
    if (process == view_.own().process.load(std::memory_order_relaxed)) return true;
    struct flock lock{};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = view_.place(peer);
    lock.l_len = 1;
    if (::fcntl(segment().fd(), F_GETLK, &lock) != 0)
        return true;  // cannot know: the timeout decides
    return lock.l_type != F_UNLCK;
}

bool Membership::present(uint32_t peer) const {
    if (closed_.load(std::memory_order_relaxed) || guard_.in_child()) raise();
    if (peer >= ranks()) {
        throw Error(Fault::invalid, "expected a rank from 0 to " + std::to_string(ranks() - 1) +
                                        ", got " + std::to_string(peer));
    }
    const auto left = static_cast<uint32_t>(Presence::left);
    return view_.control(peer).presence.load(std::memory_order_acquire) != left && alive(peer);
}

uint64_t Membership::exchange_successor(uint64_t expected, uint64_t desired) {
    if (closed_.load(std::memory_order_relaxed) || guard_.in_child()) raise();
    segment().group().successor.compare_exchange_strong(expected, desired,
                                                        std::memory_order_acq_rel);
    return expected;
}

void Membership::require_peers_alive() {
    require_healthy();
    for (const uint32_t peer : view_.here()) {
        if (peer == rank()) continue;
        const RankControl& other = view_.control(peer);
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

void Membership::record(Fault fault, std::string_view text) noexcept {
    if (guard_.in_child()) return;
    FaultRecord& failure = segment().group().failure;
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
    events_.raise(Event::failed);
    wake_all();
}

void Membership::wake_all() noexcept {
    for (uint32_t r = 0; r < ranks(); ++r) {  // of a mirror only this rank's own threads
        ring_always(view_.control(r).bell);
        ring_always(view_.control(r).mail);
    }
}

void Membership::fail(Fault fault, const std::string& text) {
    record(fault, text);
    raise();
}

void Membership::fail_gone(uint32_t rank, const std::string& why) {
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

std::optional<Error> Membership::failure() const {
    const FaultRecord& failure = segment().group().failure;
    if (!failed()) return std::nullopt;
    // The writer may have been killed between the two states.
    for (int i = 0; i < 1000 && failure.state.load(std::memory_order_acquire) != 2; ++i)
        ::usleep(100);
    if (failure.state.load(std::memory_order_acquire) != 2)
        return Error(Fault::aborted,
                     "the group has failed, and who failed it ended before it said why");
    return Error(static_cast<Fault>(failure.fault.load(std::memory_order_relaxed)),
                 std::string(failure.text, ::strnlen(failure.text, kFaultText)));
}

void Membership::leave() noexcept {
    if (guard_.in_child() || closed_.exchange(true)) return;
    view_.own().presence.store(static_cast<uint32_t>(Presence::left), std::memory_order_release);
    wake_all();  // those who wait for this rank look again, and see
}

}  // namespace unisono
