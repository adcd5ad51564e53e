#include "mail.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "call.h"
#include "kernels/kernels.h"

namespace unisono {
namespace {

// Element type and bytes, as the receiver checks them.
uint64_t kind_of(const Message& m) {
    return static_cast<uint64_t>(m.dtype);
}

std::unique_ptr<std::byte[]> room_for(uint64_t bytes) {
    if (bytes > PTRDIFF_MAX) throw std::bad_alloc();
    return std::make_unique_for_overwrite<std::byte[]>(bytes);
}

std::byte* payload(MailSlot* slot) {
    return reinterpret_cast<std::byte*>(slot + 1);
}

}  // namespace

PostOffice::PostOffice(View& view, Membership& members, Waiter waiter, const MakeWire& make_wire)
    : view_(view),
      members_(members),
      waiter_(waiter),
      wire_(make_wire ? make_wire(*this) : nullptr),
      lanes_(members.ranks()) {}

std::shared_ptr<Parcel> PostOffice::send(const Message& message) {
    return begin(message, true);
}

std::shared_ptr<Parcel> PostOffice::receive(const Message& message) {
    return begin(message, false);
}

std::shared_ptr<Parcel> PostOffice::begin(const Message& message, bool sends) {
    members_.require_healthy();
    const bool any = !sends && message.peer == kAnySource;
    const auto peer = static_cast<uint32_t>(message.peer);
    if (!any && peer >= lanes_.size())
        throw Error(Fault::invalid, errand_text(sends, message.peer) +
                                        ": expected a rank from 0 to " +
                                        std::to_string(lanes_.size() - 1) + ", got " +
                                        std::to_string(message.peer));
    auto parcel = std::make_shared<Parcel>(message, sends);
    const std::lock_guard lock(mutex_);
    if (sends && peer == members_.rank()) {
        send_here(*parcel);
        return parcel;
    }
    if (!sends && take_early(parcel)) return parcel;
    if (sends) {
        lanes_[peer].sends.push_back(parcel);
    } else {
        receives_.push_back(parcel);
    }
    poll();
    return parcel;
}

// A message to this rank itself is copied at once: to whom it is for, or aside until it is asked
// for.
void PostOffice::send_here(Parcel& parcel) {
    const Message& m = parcel.message_;
    Lane& lane = lanes_[members_.rank()];
    lane.receiving = wanted(members_.rank(), m.tag);
    if (lane.receiving) {
        accept(*lane.receiving, members_.rank(), kind_of(m), m.bytes);
        if (m.bytes) std::memmove(lane.receiving->message_.data, m.data, m.bytes);
        finish(*std::exchange(lane.receiving, nullptr));
    } else {
        auto data = room_for(m.bytes);
        kernels::copy(data.get(), m.data, m.bytes);
        lane.early.push_back({m.tag, kind_of(m), m.bytes, std::move(data), m.bytes, nullptr});
    }
    finish(parcel);
}

// Moves whatever can move without waiting; true if anything did. Once the group has failed nothing
// moves any more, and all parcels end: their callers are about to take their memory back.
bool PostOffice::poll() {
    try {
        members_.require_healthy();
    } catch (const std::exception& error) {
        fail_all(error_of(error));
        throw;
    }
    try {
        return poll_lanes();
    } catch (const Error& error) {  // of the carrier's, perhaps: then nobody has heard of it
        members_.record(error.fault(), error.what());
        fail_all(error);
        throw;
    } catch (const std::exception& error) {  // no memory for what nobody has asked for yet
        members_.record_made(Fault::system, [&] {
            return "rank " + std::to_string(members_.rank()) +
                   " cannot store a message: " + error_of(error).what();
        });
        fail_all(error_of(error));
        members_.require_healthy();
        throw;
    }
}

bool PostOffice::poll_lanes() {
    bool moved = wire_ && wire_->poll();
    for (uint32_t peer = 0; peer < lanes_.size(); ++peer) {
        if (peer == members_.rank()) continue;
        Lane& lane = lanes_[peer];
        if (!view_.local(peer)) {
            moved |= poll_letters(peer, lane);
            continue;
        }
        if (!lane.sends.empty()) moved |= poll_sends(peer, lane);
        if (lane.receiving || lane.storing || !receives_.empty())
            moved |= poll_receives(peer, lane);
    }
    return moved;
}

// Hands new letters to the wire, straight from the caller's memory, and ends those that have left.
bool PostOffice::poll_letters(uint32_t peer, Lane& lane) {
    for (const auto& parcel : lane.sends) {
        if (parcel->letter_ != 0) continue;
        const Message& m = parcel->message_;
        parcel->letter_ = ++lane.letters;
        Frame frame{};
        frame.kind = FrameKind::letter;
        frame.place = m.tag;
        frame.called.kind = static_cast<uint32_t>(m.dtype);
        const Load load{0, m.data, m.bytes};
        wire_->send(peer, frame, {&load, 1});
    }
    const uint64_t handed = wire_->handed(peer);
    bool moved = false;
    while (!lane.sends.empty() && lane.sends.front()->letter_ <= handed) {
        finish(*lane.sends.front());
        lane.sends.pop_front();
        moved = true;
    }
    return moved;
}

bool PostOffice::poll_sends(uint32_t peer, Lane& lane) {
    const uint32_t from = view_.place(members_.rank()), to = view_.place(peer);
    Mailbox& box = view_.segment().mailbox(from, to);
    const uint64_t most = view_.segment().shape().mail_slot_bytes;
    bool moved = false;
    uint64_t head = box.head.load(std::memory_order_relaxed);
    while (!lane.sends.empty() &&
           head - box.tail.load(std::memory_order_acquire) < view_.segment().shape().mail_slots) {
        Parcel& parcel = *lane.sends.front();
        MailSlot* slot = view_.segment().mail_slot(from, to, head);
        slot->bytes.store(parcel.message_.bytes, std::memory_order_relaxed);
        slot->tag.store(parcel.message_.tag, std::memory_order_relaxed);
        slot->kind.store(kind_of(parcel.message_), std::memory_order_relaxed);
        const uint64_t bytes = std::min(most, parcel.message_.bytes - parcel.moved_);
        kernels::copy(payload(slot), parcel.message_.data + parcel.moved_, bytes);
        parcel.moved_ += bytes;
        box.head.store(++head, std::memory_order_release);
        ring(view_.control(peer).mail);
        moved = true;
        if (parcel.moved_ == parcel.message_.bytes) {
            finish(parcel);
            lane.sends.pop_front();
        }
    }
    return moved;
}

bool PostOffice::poll_receives(uint32_t peer, Lane& lane) {
    const uint32_t from = view_.place(peer), to = view_.place(members_.rank());
    Mailbox& box = view_.segment().mailbox(from, to);
    const uint64_t most = view_.segment().shape().mail_slot_bytes;
    bool moved = false;
    uint64_t tail = box.tail.load(std::memory_order_relaxed);
    while (box.head.load(std::memory_order_acquire) != tail) {
        MailSlot* slot = view_.segment().mail_slot(from, to, tail);
        if (!lane.receiving && !lane.storing) {
            if (receives_.empty()) break;  // nobody asks: leave it there, the sender is held back
            match(peer, lane, slot->tag.load(std::memory_order_relaxed),
                  slot->kind.load(std::memory_order_relaxed),
                  slot->bytes.load(std::memory_order_relaxed));
        }
        std::byte* into = nullptr;
        uint64_t left = 0;
        if (lane.receiving) {
            into = lane.receiving->message_.data + lane.receiving->moved_;
            left = lane.receiving->message_.bytes - lane.receiving->moved_;
        } else {
            into = lane.storing->data.get() + lane.storing->filled;
            left = lane.storing->bytes - lane.storing->filled;
        }
        const uint64_t bytes = std::min(most, left);
        kernels::copy(into, payload(slot), bytes);
        box.tail.store(++tail, std::memory_order_release);
        ring(view_.control(peer).mail);
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

// Decides where a message goes that begins to come.
void PostOffice::match(uint32_t peer, Lane& lane, uint64_t tag, uint64_t kind, uint64_t bytes) {
    if (auto parcel = wanted(peer, tag)) {
        lane.receiving = std::move(parcel);
        return accept(*lane.receiving, peer, kind, bytes);
    }
    // Another tag is asked for: this message must make way.
    lane.early.push_back({tag, kind, bytes, room_for(bytes), 0, nullptr});
    lane.storing = &lane.early.back();
}

// A letter from another host goes straight to where it is wanted; if nobody asks for anything, it
// is left in the network, which holds the sender back.
std::byte* PostOffice::place(uint32_t peer, const Frame& frame) {
    if (frame.kind == FrameKind::failed) {
        if (std::byte* text = news_.place(peer, frame)) return text;
    }
    if (frame.kind != FrameKind::letter || frame.called.kind >= num_dtypes)
        nonsense(peer, "a frame of kind " + std::to_string(static_cast<uint32_t>(frame.kind)) +
                           " and type " + std::to_string(frame.called.kind) +
                           ": expected a letter of a type below " + std::to_string(num_dtypes));
    if (receives_.empty()) return nullptr;
    Lane& lane = lanes_[peer];
    match(peer, lane, frame.place, frame.called.kind, frame.bytes);
    if (frame.bytes == 0) return &nowhere_;
    return lane.receiving ? lane.receiving->message_.data : lane.storing->data.get();
}

void PostOffice::deliver(uint32_t peer, const Frame& frame) {
    Lane& lane = lanes_[peer];
    if (frame.kind == FrameKind::left) {
        lane.departed = true;
    } else if (frame.kind == FrameKind::failed) {
        const Error error = news_.read(peer, frame);
        members_.fail(error.fault(), error.what());
    } else if (frame.kind != FrameKind::letter) {
        nonsense(peer, "a frame of kind " + std::to_string(static_cast<uint32_t>(frame.kind)) +
                           ", which the connections of messages do not carry");
    } else if (lane.receiving) {
        finish(*std::exchange(lane.receiving, nullptr));
    } else if (Early* stored = std::exchange(lane.storing, nullptr)) {
        stored->filled = stored->bytes;
        if (!stored->claimant) return;
        Parcel& parcel = *stored->claimant;
        kernels::copy(parcel.message_.data, stored->data.get(), stored->filled);
        finish(parcel);
        lane.early.remove_if([stored](const Early& early) { return &early == stored; });
    }
}

void PostOffice::lost(uint32_t peer, const std::string& why) {
    if (lanes_[peer].departed) return;
    members_.fail_gone(peer, why);
}

// The first posted receive that this message satisfies; it leaves the list.
std::shared_ptr<Parcel> PostOffice::wanted(uint32_t peer, uint64_t tag) {
    for (auto it = receives_.begin(); it != receives_.end(); ++it) {
        const Message& m = (*it)->message_;
        if (m.tag != tag || (m.peer != kAnySource && m.peer != static_cast<int32_t>(peer)))
            continue;
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
            if (it->tag != m.tag || it->claimant) continue;
            accept(*parcel, peer, it->kind, it->bytes);
            if (lane.storing == &*it && !view_.local(peer)) {  // the wire writes there
                it->claimant = parcel;
                return true;
            }
            kernels::copy(m.data, it->data.get(), it->filled);
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
    const Message& m = parcel.message_;
    parcel.source_.store(static_cast<int32_t>(peer), std::memory_order_relaxed);
    if (kind == kind_of(m) && bytes == m.bytes) return;
    const auto size = [](uint64_t k) { return size_of(static_cast<DType>(k)); };
    if (kind >= num_dtypes) {
        members_.fail(Fault::mismatch, "rank " + std::to_string(peer) + " sent a message of type " +
                                           std::to_string(kind) + ": expected one below " +
                                           std::to_string(num_dtypes));
    }
    members_.fail(Fault::mismatch,
                  "rank " + std::to_string(peer) + " sent " + std::to_string(bytes) + " bytes (" +
                      std::to_string(bytes / size(kind)) + " elements of type " +
                      name_of(static_cast<DType>(kind)) + ") with tag " + std::to_string(m.tag) +
                      ", but rank " + std::to_string(members_.rank()) + " receives " +
                      std::to_string(m.bytes) + " bytes (" +
                      std::to_string(m.bytes / size_of(m.dtype)) + " elements of type " +
                      name_of(m.dtype) + ")");
}

void PostOffice::finish(Parcel& parcel) noexcept {
    parcel.done_.store(true, std::memory_order_release);
    ring(view_.own().mail);  // a thread of this rank may sleep for it
    if (away_sleepers_.load(std::memory_order_seq_cst) > 0) wire_->wake();
}

void PostOffice::fail_all(const Error& error) noexcept {
    if (wire_ && !wire_closed_) unfinished_ = unfinished_ || !wire_->idle();
    const bool all_ours = !wire_ || wire_->forget_letters();
    const auto fail = [&](const std::shared_ptr<Parcel>& parcel) {
        parcel->error_ = error;
        finish(*parcel);
    };
    for (uint32_t peer = 0; peer < lanes_.size(); ++peer) {
        Lane& lane = lanes_[peer];
        if (!all_ours && !view_.local(peer)) keep(lane);
        for (const auto& parcel : lane.sends) fail(parcel);
        lane.sends.clear();
        if (lane.receiving) fail(std::exchange(lane.receiving, nullptr));
        for (Early& early : lane.early) {
            if (early.claimant) fail(std::exchange(early.claimant, nullptr));
        }
    }
    for (const auto& parcel : receives_) fail(parcel);
    receives_.clear();
}

// Until the process ends: a wire that was given up may still use the memory of this lane.
void PostOffice::keep(Lane& lane) noexcept {
    struct Kept {
        std::deque<std::shared_ptr<Parcel>> sends;
        std::shared_ptr<Parcel> receiving;
        std::list<Early> early;
    };
    auto* const kept = new (std::nothrow) Kept{lane.sends, lane.receiving, {}};
    if (!kept) return;
    kept->early.splice(kept->early.end(), lane.early);
    lane.storing = nullptr;
}

bool PostOffice::idle() const noexcept {
    return receives_.empty() && std::all_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) {
               return lane.sends.empty() && !lane.receiving &&
                      !(lane.storing && lane.storing->claimant);
           });
}

// After the group has failed: from here on nothing moves into memory that is the callers' again.
void PostOffice::end_all() noexcept {
    const std::lock_guard lock(mutex_);
    try {
        poll();
    } catch (const std::exception&) {  // all parcels have it now
    }
}

}  // namespace unisono
