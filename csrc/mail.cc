#include "mail.h"

#include <csignal>

#include <algorithm>
#include <cstring>
#include <utility>

#include "call.h"

namespace unisono {
namespace {

// Element type and bytes, as the receiver checks them.
uint64_t kind_of(const Message& m) { return static_cast<uint64_t>(m.dtype); }

std::byte* payload(MailSlot* slot) { return reinterpret_cast<std::byte*>(slot + 1); }

}  // namespace

PostOffice::PostOffice(Segment& segment, Membership& members, Waiter waiter)
    : segment_(segment), members_(members), waiter_(waiter), lanes_(members.ranks()) {}

std::shared_ptr<Parcel> PostOffice::send(const Message& message) {
    members_.require_healthy();
    auto parcel = std::make_shared<Parcel>(message, true);
    const std::lock_guard lock(mutex_);
    lanes_[static_cast<size_t>(message.peer)].sends.push_back(parcel);
    poll();
    return parcel;
}

std::shared_ptr<Parcel> PostOffice::receive(const Message& message) {
    members_.require_healthy();
    auto parcel = std::make_shared<Parcel>(message, false);
    const std::lock_guard lock(mutex_);
    if (!take_early(parcel)) {
        receives_.push_back(parcel);
        poll();
    }
    return parcel;
}

// Moves whatever can move without waiting; true if anything did.
bool PostOffice::poll() {
    bool moved = false;
    for (uint32_t peer = 0; peer < lanes_.size(); ++peer) {
        if (peer == members_.rank()) continue;
        Lane& lane = lanes_[peer];
        if (!lane.sends.empty()) moved |= poll_sends(peer, lane);
        if (lane.receiving || lane.storing || !receives_.empty()) moved |= poll_receives(peer, lane);
    }
    return moved;
}

bool PostOffice::poll_sends(uint32_t peer, Lane& lane) {
    Mailbox& box = segment_.mailbox(members_.rank(), peer);
    const uint64_t most = segment_.shape().mail_slot_bytes;
    bool moved = false;
    uint64_t head = box.head.load(std::memory_order_relaxed);
    while (!lane.sends.empty() &&
           head - box.tail.load(std::memory_order_acquire) < segment_.shape().mail_slots) {
        Parcel& parcel = *lane.sends.front();
        MailSlot* slot = segment_.mail_slot(members_.rank(), peer, head);
        slot->bytes = parcel.message_.bytes;
        slot->tag = parcel.message_.tag;
        slot->kind = kind_of(parcel.message_);
        const uint64_t bytes = std::min(most, parcel.message_.bytes - parcel.moved_);
        if (bytes) std::memcpy(payload(slot), parcel.message_.data + parcel.moved_, bytes);
        parcel.moved_ += bytes;
        box.head.store(++head, std::memory_order_release);
        ring(segment_.rank(peer).mail);
        moved = true;
        if (parcel.moved_ == parcel.message_.bytes) {
            finish(parcel);
            lane.sends.pop_front();
        }
    }
    return moved;
}

bool PostOffice::poll_receives(uint32_t peer, Lane& lane) {
    Mailbox& box = segment_.mailbox(peer, members_.rank());
    const uint64_t most = segment_.shape().mail_slot_bytes;
    bool moved = false;
    uint64_t tail = box.tail.load(std::memory_order_relaxed);
    while (box.head.load(std::memory_order_acquire) != tail) {
        MailSlot* slot = segment_.mail_slot(peer, members_.rank(), tail);
        if (!lane.receiving && !lane.storing) {
            if (receives_.empty()) break;  // nobody asks: leave it there, the sender is held back
            match(peer, lane, *slot);
        }
        std::byte* to = nullptr;
        uint64_t left = 0;
        if (lane.receiving) {
            to = lane.receiving->message_.data + lane.receiving->moved_;
            left = lane.receiving->message_.bytes - lane.receiving->moved_;
        } else {
            to = lane.storing->data.data() + lane.storing->filled;
            left = lane.storing->bytes - lane.storing->filled;
        }
        const uint64_t bytes = std::min(most, left);
        if (bytes) std::memcpy(to, payload(slot), bytes);
        box.tail.store(++tail, std::memory_order_release);
        ring(segment_.rank(peer).mail);
        moved = true;
        if (lane.receiving) {
            lane.receiving->moved_ += bytes;
            if (bytes == left) finish(*std::exchange(lane.receiving, nullptr));
        } else {
            lane.storing->filled += bytes;
            if (bytes == left) lane.storing = nullptr;
        }
    }
    return moved;
}

// Decides where the message that begins in `slot` goes.
void PostOffice::match(uint32_t peer, Lane& lane, const MailSlot& slot) {
    if (auto parcel = wanted(peer, slot.tag)) {
        accept(*parcel, peer, slot.kind, slot.bytes);
        lane.receiving = std::move(parcel);
        return;
    }
    // Another tag is asked for: this message must make way.
    lane.early.push_back({slot.tag, slot.kind, slot.bytes, std::vector<std::byte>(slot.bytes)});
    lane.storing = &lane.early.back();
}

// The first posted receive that this message satisfies; it leaves the list.
std::shared_ptr<Parcel> PostOffice::wanted(uint32_t peer, uint64_t tag) {
    for (auto it = receives_.begin(); it != receives_.end(); ++it) {
        const Message& m = (*it)->message_;
        if (m.tag != tag || (m.peer != kAnySource && m.peer != static_cast<int32_t>(peer))) continue;
        auto parcel = *it;
        receives_.erase(it);
        return parcel;
    }
    return nullptr;
}

bool PostOffice::take_early(const std::shared_ptr<Parcel>& parcel) {
    const Message& m = parcel->message_;
    for (uint32_t peer = 0; peer < lanes_.size(); ++peer) {
        if (m.peer != kAnySource && m.peer != static_cast<int32_t>(peer)) continue;
        Lane& lane = lanes_[peer];
        for (auto it = lane.early.begin(); it != lane.early.end(); ++it) {
            if (it->tag != m.tag) continue;
            accept(*parcel, peer, it->kind, it->bytes);
            if (it->filled) std::memcpy(m.data, it->data.data(), it->filled);
            parcel->moved_ = it->filled;
            if (lane.storing == &*it) {  // its end is still to come, and goes where it belongs
                lane.storing = nullptr;
                lane.receiving = parcel;
            } else {
                finish(*parcel);
            }
            lane.early.erase(it);
            return true;
        }
    }
    return false;
}

void PostOffice::accept(Parcel& parcel, uint32_t peer, uint64_t kind, uint64_t bytes) {
    Message& m = parcel.message_;
    m.peer = static_cast<int32_t>(peer);
    if (kind == kind_of(m) && bytes == m.bytes) return;
    const auto size = [](uint64_t k) { return size_of(static_cast<DType>(k)); };
    if (kind >= num_dtypes) members_.fail(Fault::mismatch, "a message of unknown type arrived");
    members_.fail(Fault::mismatch,
                  "rank " + std::to_string(peer) + " sent " + std::to_string(bytes) + " bytes (" +
                      std::to_string(bytes / size(kind)) + " elements of type " + name_of(static_cast<DType>(kind)) +
                      ") with tag " + std::to_string(m.tag) + ", but rank " + std::to_string(members_.rank()) +
                      " receives " + std::to_string(m.bytes) + " bytes (" + std::to_string(m.bytes / size_of(m.dtype)) +
                      " elements of type " + name_of(m.dtype) + ")");
}

void PostOffice::finish(Parcel& parcel) noexcept {
    parcel.done_.store(true, std::memory_order_release);
    changed_.notify_all();
    ring(segment_.rank(members_.rank()).mail);  // a thread of this rank may sleep for it
}

void PostOffice::fail_all(const Error& error) noexcept {
    const auto fail = [&](const std::shared_ptr<Parcel>& parcel) {
        parcel->error_ = error;
        finish(*parcel);
    };
    for (Lane& lane : lanes_) {
        for (const auto& parcel : lane.sends) fail(parcel);
        lane.sends.clear();
        if (lane.receiving) fail(std::exchange(lane.receiving, nullptr));
    }
    for (const auto& parcel : receives_) fail(parcel);
    receives_.clear();
}

bool PostOffice::idle() const noexcept {
    return receives_.empty() && std::all_of(lanes_.begin(), lanes_.end(),
                                            [](const Lane& lane) { return lane.sends.empty() && !lane.receiving; });
}

void PostOffice::carry_on() {
    const std::lock_guard lock(mutex_);
    if (stopping_ || idle()) return;
    if (!thread_.joinable()) {
        thread_ = std::thread([this] {
            sigset_t all;
            sigfillset(&all);
            pthread_sigmask(SIG_SETMASK, &all, nullptr);
            progress_loop();
        });
    }
    changed_.notify_all();
}

bool PostOffice::wait(Parcel& parcel, double timeout_s, double limit_s, const Interrupted& interrupted) {
    Deadline deadline(timeout_s);
    const auto ready = [&] {
        if (parcel.done()) return true;
        const std::unique_lock lock(mutex_, std::try_to_lock);
        if (lock.owns_lock()) poll();
        return parcel.done();
    };
    const auto inspect = [&] {
        members_.require_healthy();
        check_departed(parcel);
    };
    Bell& bell = segment_.rank(members_.rank()).mail;
    if (!ready() && !waiter_.wait(bell, ready, inspect, [&] { return late(parcel); }, deadline, interrupted,
                                  limit_s < 0 ? 0 : std::max(limit_s, 1e-9))) {
        return false;
    }
    if (parcel.error_) throw *parcel.error_;
    return true;
}

void PostOffice::check_departed(const Parcel& parcel) {
    const Message& m = parcel.message_;
    for (uint32_t peer = 0; peer < lanes_.size(); ++peer) {
        if (peer == members_.rank() || (m.peer != kAnySource && m.peer != static_cast<int32_t>(peer))) continue;
        const bool left = segment_.rank(peer).presence.load(std::memory_order_acquire) ==
                          static_cast<uint32_t>(Presence::left);
        if (!left) {
            if (m.peer == kAnySource) return;  // somebody may still send
            continue;
        }
        Mailbox& box = segment_.mailbox(peer, members_.rank());
        const bool pending = box.head.load(std::memory_order_acquire) != box.tail.load(std::memory_order_relaxed);
        if (m.peer == kAnySource || (!parcel.sends_ && pending)) continue;
        if (parcel.done()) return;
        members_.fail(Fault::peer_lost, "rank " + std::to_string(peer) + " left the group while rank " +
                                            std::to_string(members_.rank()) + " was " +
                                            (parcel.sends_ ? "sending to it" : "receiving from it"));
    }
}

std::string PostOffice::late(const Parcel& parcel) const {
    const Message& m = parcel.message_;
    const std::string peer = m.peer == kAnySource ? "any rank" : "rank " + std::to_string(m.peer);
    return std::string(parcel.sends_ ? "send to " : "recv from ") + peer + " (" + std::to_string(m.bytes) +
           " bytes, tag " + std::to_string(m.tag) + ") timed out on rank " + std::to_string(members_.rank()) +
           (parcel.sends_ ? ": it was not received" : ": nothing was sent");
}

void PostOffice::progress_loop() {
    Bell& bell = segment_.rank(members_.rank()).mail;
    std::unique_lock lock(mutex_);
    while (!stopping_) {
        if (idle()) {
            changed_.wait(lock, [this] { return stopping_ || !idle(); });
            continue;
        }
        bool moved = false;
        try {
            members_.require_healthy();
            moved = poll();
        } catch (const Error& error) {
            fail_all(error);
        }
        if (moved || idle()) continue;
        lock.unlock();
        const auto ready = [&] {  // looks once more after it has said that it sleeps
            const std::lock_guard again(mutex_);
            return stopping_ || members_.failed() || poll() || idle();
        };
        try {
            if (sleep_on(bell, ready, 0.05) == Woken::timed_out) waiter_.check_world({});
        } catch (const Error&) {  // recorded in the group: the loop finds it, and ends what is under way
        }
        lock.lock();
    }
}

void PostOffice::stop() noexcept {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        changed_.notify_all();
    }
    if (!thread_.joinable()) return;
    if (members_.in_child()) {
        thread_.detach();
        return;
    }
    ring_always(segment_.rank(members_.rank()).mail);
    thread_.join();
    fail_all(Error(Fault::aborted, "the communicator was closed with this message under way"));
}

}  // namespace unisono
