// Large messages on one host. The receiver copies chunks from the sender's memory (its shared heap,
// or any memory by the kernel), beginning with the first chunk. A waiting sender helps: it copies
// chunks into the receiver's memory, beginning with the last chunk. If the kernel forbids the
// reads, the sender copies blocks into shared memory, and the receiver copies them out.
#include <unistd.h>

#include <algorithm>

#include "kernels/kernels.h"
#include "p2p/shm_endpoint.h"

namespace unisono::p2p {
namespace {

// Limits for the bytes of one system call. Measured: a message that both ranks move in halves takes
// half the time of one call for the whole message. With quarters, the calls of the two ranks slow
// each other.
constexpr uint64_t kLeastChunk = 8 << 10, kMostChunk = 512 << 10;
// Bytes of one transfer that are moved before the other transfers of the engine get their turn.
constexpr uint64_t kMostAtOnce = 4 << 20;
constexpr uint64_t kFront = 0xffffffff;  // Mask of the receiver's count in `Transfer::claims`.
constexpr useconds_t kBetweenChecks_us = 100;

// The division of a message into chunks, equal at both ends.
struct Chunks {
    Chunks(const Transfer& t, uint64_t all) noexcept : bytes(all) {
        const bool whole = t.whole.load(std::memory_order_relaxed) != 0;
        const uint64_t half = std::clamp(all / 2, kLeastChunk, kMostChunk);
        each = whole ? kMostAtOnce : (half + 4095) / 4096 * 4096;
        count = (all + each - 1) / each;
    }
    [[nodiscard]] uint64_t at(uint64_t chunk) const noexcept { return chunk * each; }
    [[nodiscard]] uint64_t length(uint64_t chunk) const noexcept {
        return std::min(each, bytes - at(chunk));
    }

    uint64_t bytes, each, count;
};

// Counts a write as complete when the object is destroyed.
class WriteOver {
  public:
    explicit WriteOver(Transfer& t) noexcept : t_(t) {}
    WriteOver(const WriteOver&) = delete;
    WriteOver& operator=(const WriteOver&) = delete;
    ~WriteOver() { t_.written.fetch_add(1, std::memory_order_release); }

  private:
    Transfer& t_;
};

Phase phase_of(const Transfer& t) noexcept {
    return static_cast<Phase>(t.phase.load(std::memory_order_acquire));
}

void set_phase(Transfer& t, Phase phase) noexcept {
    t.phase.store(static_cast<uint64_t>(phase), std::memory_order_release);
}

// Changes the phase from `expected` to `desired`. If the phase has another value, returns false and
// stores this value in `expected`.
bool exchange_phase(Transfer& t, Phase& expected, Phase desired) noexcept {
    auto seen = static_cast<uint64_t>(expected);
    const bool done = t.phase.compare_exchange_strong(seen, static_cast<uint64_t>(desired),
                                                      std::memory_order_acq_rel);
    expected = static_cast<Phase>(seen);
    return done;
}

}  // namespace

bool ShmEndpoint::reaches() noexcept {
    if (!single_copy_) return false;
    if (reach_ == Reach::unknown) {
        reach_ = !cross_memory_.reach(peer_) ? Reach::none
                 : CrossMemory::may_write()  ? Reach::all
                                             : Reach::reads;
    }
    return reach_ != Reach::none;
}

// Claims an offered message. Returns false if the sender has withdrawn the message.
bool ShmEndpoint::claim_transfer(uint32_t transfer) {
    Phase seen = Phase::offered;
    if (exchange_phase(in_.shared->transfers[transfer], seen, Phase::claimed)) return true;
    if (seen == Phase::claimed) return true;
    if (!give_back_withdrawn(transfer)) nonsense_phase(seen);
    return false;
}

// Returns the transfer to a sender that has withdrawn its message.
bool ShmEndpoint::give_back_withdrawn(uint32_t transfer) noexcept {
    Transfer& t = in_.shared->transfers[transfer];
    if (phase_of(t) != Phase::withdrawn) return false;
    set_phase(t, Phase::complete);
    step();
    return true;
}

void ShmEndpoint::nonsense_phase(Phase phase) {
    nonsense("a message in phase " + std::to_string(static_cast<uint64_t>(phase)) +
             ": expected an offered message, whose phase only the receiver changes");
}

bool ShmEndpoint::accept_transfer(uint32_t transfer, Request& receive) {
    if (std::any_of(incoming_.begin(), incoming_.end(),
                    [&](const Active& a) { return a.transfer == transfer; }))
        nonsense("two messages by transfer " + std::to_string(transfer));
    incoming_.reserve(kTransfers + 1);
    Transfer& t = in_.shared->transfers[transfer];
    // An empty message is never staged, because the sender would wait for its turn without end.
    const bool reads = receive.message().bytes == 0 || reaches() ||
                       CrossMemory::is_in_heap(t.source.load(std::memory_order_relaxed));
    const Phase moves = reads ? Phase::reading : Phase::staging;
    t.target.store(reinterpret_cast<uintptr_t>(receive.message().data), std::memory_order_relaxed);
    t.claims.store(0, std::memory_order_relaxed);
    t.written.store(0, std::memory_order_relaxed);
    const bool alone = incoming_.empty() && !has_arrivals();
    t.whole.store(alone ? 0 : 1, std::memory_order_relaxed);
    t.turn.store(turns_, std::memory_order_relaxed);
    Phase seen = Phase::offered;
    const bool begun = exchange_phase(t, seen, moves) ||
                       (seen == Phase::claimed && exchange_phase(t, seen, moves));
    if (!begun) {
        if (!give_back_withdrawn(transfer)) nonsense_phase(seen);
        return false;
    }
    if (moves == Phase::staging) ++turns_;
    receive.moved = 0;
    incoming_.push_back({transfer, &receive, moves});
    step();
    return true;
}

// Counts a step to which the sender may have to react, and wakes the sender.
void ShmEndpoint::step() noexcept {
    std::atomic<uint64_t>& steps = in_.shared->steps;
    steps.store(steps.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    ring_peer();
}

bool ShmEndpoint::progress() {
    bool moved = false;
    for (size_t i = 0; i < incoming_.size();) {
        const Active active = incoming_[i];
        moved |= advance_receive(active);
        i += i < incoming_.size() && incoming_[i].transfer == active.transfer;
    }
    return advance_sends() || moved;
}

// Advances the outgoing transfers. Does nothing unless the receiver has made a step since the last
// call, or the last call itself made progress, which may allow more.
bool ShmEndpoint::advance_sends() {
    const uint64_t steps = out_.shared->steps.load(std::memory_order_acquire);
    if (steps == steps_seen_) return false;
    bool moved = false;
    for (size_t i = 0; i < outgoing_.size();) {
        const Active active = outgoing_[i];
        moved |= advance_send(active);
        i += i < outgoing_.size() && outgoing_[i].transfer == active.transfer;
    }
    if (!moved) steps_seen_ = steps;
    return moved;
}

bool ShmEndpoint::advance_receive(const Active& active) {
    Transfer& t = in_.shared->transfers[active.transfer];
    const bool staged = active.phase == Phase::staging;
    bool all = false;
    const bool moved = staged ? unstage(t, *active.request) : read(t, *active.request);
    if (staged) {
        all = active.request->moved == active.request->message().bytes;
        if (all) ++unstaged_turn_;
    } else {
        const uint64_t claims = t.claims.load(std::memory_order_acquire);
        all = (claims & kFront) + (claims >> 32) ==
                  Chunks(t, active.request->message().bytes).count &&
              t.written.load(std::memory_order_acquire) == claims >> 32;
    }
    if (!all) return moved;
    // If the group has failed, the sender may already have reused its memory, so the data may be
    // wrong.
    members_.require_healthy();
    Phase phase = active.phase;
    if (!exchange_phase(t, phase, Phase::complete)) {
        if (phase != Phase::withdrawn) nonsense_phase(phase);
        members_.fail(Fault::peer_lost, "rank " + std::to_string(peer_) +
                                            " gave up a message while rank " +
                                            std::to_string(members_.rank()) + " received it");
    }
    step();
    std::erase_if(incoming_, [&](const Active& a) { return a.transfer == active.transfer; });
    completion_.complete(*active.request);
    return true;
}

// Copies chunks from the sender's memory, the first unclaimed chunk first. One call copies only a
// limited number of bytes.
bool ShmEndpoint::read(Transfer& t, Request& receive) {
    const Message& m = receive.message();
    const Chunks chunks(t, m.bytes);
    const uint64_t source = t.source.load(std::memory_order_relaxed);
    uint64_t claims = t.claims.load(std::memory_order_acquire), read = 0;
    while (read < kMostAtOnce && (claims & kFront) + (claims >> 32) < chunks.count) {
        if (!t.claims.compare_exchange_weak(claims, claims + 1, std::memory_order_acq_rel))
            continue;
        const uint64_t at = chunks.at(claims & kFront), bytes = chunks.length(claims & kFront);
        cross_memory_.read_at(peer_, m.data + at, source, at, bytes);
        read += bytes;
        claims = t.claims.load(std::memory_order_acquire);
    }
    return read > 0;
}

bool ShmEndpoint::advance_send(const Active& active) {
    Transfer& t = out_.shared->transfers[active.transfer];
    switch (phase_of(t)) {
        case Phase::complete: {
            Request* const send = active.request;
            set_phase(t, Phase::idle);
            if (active.transfer != kAside) free_.push_back(active.transfer);
            std::erase_if(outgoing_,
                          [&](const Active& a) { return a.transfer == active.transfer; });
            if (send) completion_.complete(*send);
            return true;
        }
        case Phase::reading:
            return active.request && reaches() && reach_ == Reach::all && help(t, *active.request);
        case Phase::staging:
            return active.request && stage(t, *active.request);
        default:
            return false;
    }
}

// Copies chunks into the receiver's memory, the last unclaimed chunk first. One call copies only a
// limited number of bytes.
bool ShmEndpoint::help(Transfer& t, const Request& send) {
    const Message& m = send.message();
    const Chunks chunks(t, m.bytes);
    const uint64_t target = t.target.load(std::memory_order_relaxed);
    uint64_t claims = t.claims.load(std::memory_order_acquire), written = 0;
    while (written < kMostAtOnce && (claims & kFront) + (claims >> 32) < chunks.count) {
        const uint64_t chunk = chunks.count - 1 - (claims >> 32);
        if (!t.claims.compare_exchange_weak(claims, claims + (1ULL << 32),
                                            std::memory_order_acq_rel))
            continue;
        const uint64_t at = chunks.at(chunk), bytes = chunks.length(chunk);
        // The receiver may revoke this write: it either sees this length and sets it to zero, or
        // this code sees the revoked phase.
        t.write_to.store(target + at, std::memory_order_relaxed);
        t.write_bytes.store(bytes, std::memory_order_seq_cst);
        // At the end, counts the write as finished, even if it fails; its failure is recorded
        // before that.
        const WriteOver over(t);
        if (t.phase.load(std::memory_order_seq_cst) != static_cast<uint64_t>(Phase::revoked)) {
            const int error = cross_memory_.write(peer_, &t.write_to, m.data + at, bytes);
            if (error != 0 && phase_of(t) != Phase::revoked) cross_memory_.fail_write(peer_, error);
        }
        written += bytes;
        claims = t.claims.load(std::memory_order_acquire);
    }
    if (written > 0) ring_peer();
    return written > 0;
}

bool ShmEndpoint::stage(Transfer& t, Request& send) {
    if (t.turn.load(std::memory_order_relaxed) != staged_turn_) return false;
    const Message& m = send.message();
    const uint64_t block = view_.segment().shape().staged_block_bytes();
    uint64_t staged = out_.shared->blocks.load(std::memory_order_relaxed);
    bool moved = false;
    while (send.moved < m.bytes &&
           staged - out_.shared->blocks_taken.load(std::memory_order_acquire) < kStagedBlocks) {
        const uint64_t bytes = std::min(block, m.bytes - send.moved);
        kernels::copy(out_.staging + staged % kStagedBlocks * block, m.data + send.moved, bytes);
        send.moved += bytes;
        out_.shared->blocks.store(++staged, std::memory_order_release);
        ring_peer();
        moved = true;
    }
    if (moved && send.moved == m.bytes) ++staged_turn_;
    return moved;
}

bool ShmEndpoint::unstage(Transfer& t, Request& receive) {
    if (t.turn.load(std::memory_order_relaxed) != unstaged_turn_) return false;
    const Message& m = receive.message();
    const uint64_t block = view_.segment().shape().staged_block_bytes();
    uint64_t taken = in_.shared->blocks_taken.load(std::memory_order_relaxed);
    bool moved = false;
    while (receive.moved < m.bytes && in_.shared->blocks.load(std::memory_order_acquire) != taken) {
        const uint64_t bytes = std::min(block, m.bytes - receive.moved);
        kernels::copy(m.data + receive.moved, in_.staging + taken % kStagedBlocks * block, bytes);
        receive.moved += bytes;
        in_.shared->blocks_taken.store(++taken, std::memory_order_release);
        step();
        moved = true;
    }
    return moved;
}

// Ensures that no rank writes to the receiver's memory after this function returns. No more chunks
// can be claimed. A claimed write that has not begun writes nothing. A write that has begun
// completes, because the kernel does not stop a process in the middle of a write. A sender has at
// most one write at a time. Returns false for a peer that breaks this rule or has not ended its
// write in time: it may still write.
bool ShmEndpoint::revoke(Transfer& t, Deadline& writes_end) noexcept {
    t.phase.store(static_cast<uint64_t>(Phase::revoked), std::memory_order_seq_cst);
    t.write_bytes.store(0, std::memory_order_seq_cst);
    const uint64_t claimed = t.claims.exchange(kFront, std::memory_order_acq_rel) >> 32;
    for (;;) {
        const uint64_t written = t.written.load(std::memory_order_acquire);
        if (written == claimed) return true;
        if (written > claimed || claimed - written > 1) return false;
        if (!members_.may_run(peer_)) return true;
        if (writes_end.passed()) return false;
        ::usleep(kBetweenChecks_us);
    }
}

// Withdraws a transfer because the sender's caller is about to reuse the memory. The receiver
// detects that the bytes that it has read may be wrong.
void ShmEndpoint::take_back(Transfer& t) noexcept {
    Phase phase = Phase::offered;
    while (phase == Phase::offered || phase == Phase::claimed || phase == Phase::reading ||
           phase == Phase::staging) {
        if (exchange_phase(t, phase, Phase::withdrawn)) return;
    }
}

void ShmEndpoint::fail(const Error& error, Deadline& writes_end) noexcept {
    for (const Active& active : incoming_) {
        if (active.phase == Phase::reading &&
            !revoke(in_.shared->transfers[active.transfer], writes_end))
            active.request->keep_memory();
    }
    for (const Active& active : outgoing_) {
        if (active.request) take_back(out_.shared->transfers[active.transfer]);
    }
    for (auto* const list : {&incoming_, &outgoing_}) {
        for (const Active& active : *list) {
            if (!active.request) continue;
            active.request->failed(error);
            completion_.complete(*active.request);
        }
        list->clear();
    }
}

}  // namespace unisono::p2p
