#include "p2p/shm_endpoint.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/call.h"
#include "kernels/kernels.h"

namespace unisono::p2p {
namespace {

// Largest eager message in bytes. For a larger message, one copy that both ranks share is faster
// than two copies. The limit doubles if ranks share cores, because such ranks wait for each other
// to be scheduled.
constexpr uint64_t kUsuallyEager = 8 << 10, kMostEager = 16 << 10;
constexpr uint64_t kMostAside = 256 << 10;  // Bytes of unexpected messages kept outside the ring.
// Messages that this rank asked for have this id plus the number of their transfer; others have
// smaller ids.
constexpr uint64_t kAsideIds = 1ULL << 63;

}  // namespace

ShmEndpoint::ShmEndpoint(View& view, Membership& members, CrossMemory& cross_memory,
                         Completion& completion, uint32_t peer, const bool& single_copy,
                         bool crowded)
    : view_(view),
      members_(members),
      cross_memory_(cross_memory),
      completion_(completion),
      peer_(peer),
      single_copy_(single_copy),
      eager_bytes_(std::min(crowded ? kMostEager : kUsuallyEager, ring_bytes() / 4)),
      out_(view.segment().pair(view.place(view.rank()), view.place(peer))),
      in_(view.segment().pair(view.place(peer), view.place(view.rank()))) {
    for (uint32_t t = kTransfers; t-- > 0;) free_.push_back(t);
}

void ShmEndpoint::ring_peer() noexcept {
    ring(view_.control(peer_).p2p, view_.fence());
}

void ShmEndpoint::nonsense(const std::string& what) {
    members_.fail_nonsense(peer_, what);
}

// ---- sender

// Returns the place in the byte ring with this many contiguous free bytes.
std::optional<uint64_t> ShmEndpoint::room_for(uint64_t bytes) noexcept {
    const uint64_t room = room_bytes(), left = ring_bytes() - at_byte(put_bytes_);
    const uint64_t place = left < bytes ? put_bytes_ + left : put_bytes_;
    if (place + bytes - bytes_taken_ <= room) return place;
    bytes_taken_ = out_.shared->bytes_taken.load(std::memory_order_acquire);
    if (place + bytes - bytes_taken_ <= room) return place;
    return std::nullopt;
}

bool ShmEndpoint::put(Request& send) {
    if (put_ - slots_taken_ >= slot_count()) {
        slots_taken_ = out_.shared->slots_taken.load(std::memory_order_acquire);
        if (put_ - slots_taken_ >= slot_count()) return false;
    }
    const Message& m = send.message();
    Slot& slot = out_slot(put_);
    if (m.bytes > eager_bytes_) {
        if (free_.empty()) return false;
        const uint32_t transfer = free_.back();
        offer(transfer, send);
        free_.pop_back();
        publish(slot, send, put_bytes_, transfer);
        return true;
    }
    uint64_t place = put_bytes_;
    if (m.bytes > kInline) {
        const auto room = room_for(m.bytes);
        if (!room) return false;
        place = *room;
        kernels::copy(out_.bytes + at_byte(place), m.data, m.bytes);
        put_bytes_ = place + m.bytes;
    } else if (m.bytes > 0) {
        std::memcpy(slot.data, m.data, m.bytes);
    }
    publish(slot, send, place, kNoTransfer);
    completion_.complete(send);
    return true;
}

void ShmEndpoint::publish(Slot& slot, const Request& send, uint64_t place,
                          uint32_t transfer) noexcept {
    const Message& m = send.message();
    slot.tag.store(m.tag, std::memory_order_relaxed);
    slot.bytes.store(m.bytes, std::memory_order_relaxed);
    slot.place.store(place, std::memory_order_relaxed);
    slot.kind.store(static_cast<uint32_t>(m.dtype), std::memory_order_relaxed);
    slot.transfer.store(transfer, std::memory_order_relaxed);
    slot.number.store(++put_, std::memory_order_release);
    ring_peer();
    // Prefetches the next slot, which is in the cache of the receiver's core. Otherwise the next
    // message would wait for the slot, and this wait takes as long as all other work for a small
    // message.
    __builtin_prefetch(&out_slot(put_), 1);
}

void ShmEndpoint::offer(uint32_t transfer, Request& send) {
    outgoing_.reserve(kTransfers + 1);
    const Message& m = send.message();
    Transfer& t = out_.shared->transfers[transfer];
    t.after.store(put_, std::memory_order_relaxed);
    t.source.store(cross_memory_.location_of(m.data, m.bytes), std::memory_order_relaxed);
    t.bytes.store(m.bytes, std::memory_order_relaxed);
    t.tag.store(m.tag, std::memory_order_relaxed);
    t.kind.store(static_cast<uint64_t>(m.dtype), std::memory_order_relaxed);
    t.phase.store(static_cast<uint64_t>(Phase::offered), std::memory_order_release);
    send.moved = 0;
    outgoing_.push_back({transfer, &send, Phase::offered});
}

void ShmEndpoint::hold_back(uint64_t number) {
    out_.shared->held.store(number, std::memory_order_release);
    if (number) ring_peer();
}

std::optional<uint64_t> ShmEndpoint::asked() const noexcept {
    if (out_.shared->asked.load(std::memory_order_acquire) == answered_) return std::nullopt;
    return out_.shared->asked_tag.load(std::memory_order_relaxed);
}

bool ShmEndpoint::put_aside(Request& send) {
    // Uses the transfer that is reserved for answers, or an ordinary one if the reserved transfer
    // still carries an earlier answer that the receiver has not taken.
    const bool kept = std::none_of(outgoing_.begin(), outgoing_.end(),
                                   [](const Active& a) { return a.transfer == kAside; });
    if (!kept && free_.empty()) return false;
    const uint32_t transfer = kept ? kAside : free_.back();
    offer(transfer, send);
    if (!kept) free_.pop_back();
    out_.shared->answered.store(++answered_ << 8 | (transfer + 1), std::memory_order_release);
    ring_peer();
    return true;
}

void ShmEndpoint::deny() {
    out_.shared->answered.store(++answered_ << 8, std::memory_order_release);
    ring_peer();
}

bool ShmEndpoint::withdraw(Request& send) noexcept {
    const auto found = std::find_if(outgoing_.begin(), outgoing_.end(),
                                    [&](const Active& a) { return a.request == &send; });
    if (found == outgoing_.end()) return false;
    Transfer& t = out_.shared->transfers[found->transfer];
    auto seen = static_cast<uint64_t>(Phase::offered);
    const auto take = [&] {
        return t.phase.compare_exchange_strong(seen, static_cast<uint64_t>(Phase::withdrawn),
                                               std::memory_order_acq_rel);
    };
    // A message that the receiver's probe has found cannot be withdrawn until the receiver has
    // left.
    const auto unasked = [&] {
        return seen == static_cast<uint64_t>(Phase::claimed) && view_.has_left(peer_);
    };
    if (!take() && !(unasked() && take())) return false;
    found->request =
        nullptr;  // the transfer becomes free when the receiver has seen the withdrawal
    return true;
}

// ---- receiver

bool ShmEndpoint::has_arrivals() const noexcept {
    return in_slot(seen_).number.load(std::memory_order_acquire) == seen_ + 1;
}

std::optional<Envelope> ShmEndpoint::next() {
    // A requested message comes after all messages that were sent before it, and before all later
    // messages, because later messages may have the same tag.
    const bool arrived = has_arrivals();
    read_answer();
    if (aside_waits_ &&
        in_.shared->transfers[*aside_waits_].after.load(std::memory_order_relaxed) <= seen_) {
        const uint32_t transfer = *std::exchange(aside_waits_, std::nullopt);
        const Transfer& t = in_.shared->transfers[transfer];
        const Envelope came{peer_, static_cast<uint32_t>(t.kind.load(std::memory_order_relaxed)),
                            t.tag.load(std::memory_order_relaxed),
                            t.bytes.load(std::memory_order_relaxed), kAsideIds + transfer};
        check(came, {came.bytes, 0, transfer, false});
        return came;
    }
    if (!arrived) return std::nullopt;
    const uint64_t number = seen_ + 1;
    const Slot& slot = in_slot(number - 1);
    const Envelope came{peer_, slot.kind.load(std::memory_order_relaxed),
                        slot.tag.load(std::memory_order_relaxed),
                        slot.bytes.load(std::memory_order_relaxed), number};
    const Seen seen{came.bytes, slot.place.load(std::memory_order_relaxed),
                    slot.transfer.load(std::memory_order_relaxed), false};
    check(came, seen);
    ahead_.push_back(seen);
    seen_ = number;
    free_ring();
    return came;
}

void ShmEndpoint::check(const Envelope& came, const Seen& seen) {
    const bool eager = seen.transfer == kNoTransfer;
    const uint64_t left = ring_bytes() - at_byte(seen.place);
    const uint64_t most = std::min(kMostEager, ring_bytes() / 4);
    if (eager && came.bytes > kInline && (came.bytes > most || came.bytes > left)) {
        nonsense("a message of " + std::to_string(came.bytes) + " bytes at place " +
                 std::to_string(seen.place) + " of a ring of " + std::to_string(ring_bytes()) +
                 " bytes: expected contiguous bytes, at most " + std::to_string(most));
    }
    const uint32_t transfers = came.id < kAsideIds ? kTransfers : kTransfers + 1;
    if (!eager && seen.transfer >= transfers)
        nonsense("a message by transfer " + std::to_string(seen.transfer) +
                 ": expected one below " + std::to_string(transfers));
    if (came.kind >= num_dtypes)
        nonsense("a message of type " + std::to_string(came.kind) + ": expected one below " +
                 std::to_string(num_dtypes));
}

// Copies unexpected messages out of the ring to free it for later ones, up to kMostAside bytes.
void ShmEndpoint::free_ring() {
    const auto crowded = [this] {
        const uint64_t freed = in_.shared->bytes_taken.load(std::memory_order_relaxed);
        return ahead_.size() > 1 && (ahead_.size() > slot_count() / 2 ||
                                     end_of(ahead_.back()) - freed > room_bytes() / 2);
    };
    while (crowded() && aside_bytes_ < kMostAside) {
        const uint64_t number = released_ + 1;
        const Seen& seen = ahead_.front();
        Aside aside{{}, seen.transfer};
        if (seen.transfer == kNoTransfer) {
            const std::byte* const data = content_of(number, seen);
            aside.data.assign(data, data + seen.bytes);
        }
        const uint64_t bytes = sizeof(Slot) + aside.data.size();
        aside_.emplace(number, std::move(aside));
        aside_bytes_ += bytes;
        release(number);
    }
}

// Returns the place in the byte ring after this message.
uint64_t ShmEndpoint::end_of(const Seen& seen) noexcept {
    const bool in_ring = seen.transfer == kNoTransfer && seen.bytes > kInline;
    return seen.place + (in_ring ? seen.bytes : 0);
}

const std::byte* ShmEndpoint::content_of(uint64_t number, const Seen& seen) const {
    if (seen.bytes <= kInline) return in_slot(number - 1).data;
    return in_.bytes + at_byte(seen.place);
}

// Returns the transfer of a large message, or kNoTransfer for an eager message.
uint32_t ShmEndpoint::transfer_of(const Envelope& came) const {
    if (came.id >= kAsideIds) return static_cast<uint32_t>(came.id - kAsideIds);
    return came.id <= released_ ? aside_.at(came.id).transfer
                                : ahead_[came.id - released_ - 1].transfer;
}

// Drops a message that was received or withdrawn.
void ShmEndpoint::forget(const Envelope& came) {
    if (came.id >= kAsideIds) return;
    if (came.id > released_) return release(came.id);
    const auto found = aside_.find(came.id);
    aside_bytes_ -= sizeof(Slot) + found->second.data.size();
    aside_.erase(found);
}

bool ShmEndpoint::claim(const Envelope& came) {
    const uint32_t transfer = transfer_of(came);
    if (transfer == kNoTransfer || claim_transfer(transfer)) return true;
    forget(came);
    return false;
}

bool ShmEndpoint::accept(const Envelope& came, Request& receive) {
    const uint32_t transfer = transfer_of(came);
    if (transfer != kNoTransfer) {
        forget(came);
        return accept_transfer(transfer, receive);
    }
    const std::byte* const data = came.id <= released_
                                      ? aside_.at(came.id).data.data()
                                      : content_of(came.id, ahead_[came.id - released_ - 1]);
    if (came.bytes > kInline) {
        kernels::copy(receive.message().data, data, came.bytes);
    } else if (came.bytes > 0) {
        std::memcpy(receive.message().data, data, came.bytes);
    }
    forget(came);
    completion_.complete(receive);
    return true;
}

// Marks a slot as free. Slots become free in the order of the ring.
void ShmEndpoint::release(uint64_t number) noexcept {
    ahead_[number - released_ - 1].done = true;
    if (number != released_ + 1) return;
    uint64_t bytes_end = 0;
    for (; !ahead_.empty() && ahead_.front().done; ahead_.pop_front(), ++released_)
        bytes_end = end_of(ahead_.front());
    in_.shared->bytes_taken.store(bytes_end, std::memory_order_release);
    in_.shared->slots_taken.store(released_, std::memory_order_release);
    ring_peer();
}

uint64_t ShmEndpoint::held() const noexcept {
    return in_.shared->held.load(std::memory_order_acquire);
}

void ShmEndpoint::ask(uint64_t tag) {
    answer_ = Answer::waiting;
    in_.shared->asked_tag.store(tag, std::memory_order_relaxed);
    in_.shared->asked.store(++asked_, std::memory_order_release);
    ring_peer();
}

// Reads the peer's answer to the question, if there is an answer.
void ShmEndpoint::read_answer() {
    if (answer_ != Answer::waiting) return;
    const uint64_t answered = in_.shared->answered.load(std::memory_order_acquire);
    if (answered >> 8 != asked_) return;
    answer_ = Answer::denied;
    if ((answered & 0xff) == 0) return;
    const auto transfer = static_cast<uint32_t>(answered & 0xff) - 1;
    if (transfer > kAside) nonsense("an answer by transfer " + std::to_string(transfer));
    answer_ = Answer::found;
    aside_waits_ = transfer;
}

Endpoint::Answer ShmEndpoint::answer() {
    read_answer();
    const bool final_answer = answer_ == Answer::found || answer_ == Answer::denied;
    return final_answer ? std::exchange(answer_, Answer::none) : answer_;
}

}  // namespace unisono::p2p
