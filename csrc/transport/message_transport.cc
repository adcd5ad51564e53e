#include "transport/message_transport.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "core/error.h"

namespace unisono {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kMostSpans = 128;  // Maximum number of spans in one head.
// Time for which a waiting thread polls before its first nap. It is longer while payloads are
// moving, because they move only while a thread polls.
constexpr std::chrono::microseconds kSpin{200}, kSpinWhileMoving{20000};
constexpr std::chrono::microseconds kFirstNap{20}, kLastNap{500};

std::chrono::nanoseconds time_of(double seconds) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::chrono::duration<double>(seconds));
}

}  // namespace

MessageTransport::MessageTransport(View& view, Receiver& receiver,
                                   std::unique_ptr<MessageLibrary> library)
    : view_(view), receiver_(receiver), library_(std::move(library)), peers_(view.ranks()) {
    library_->listen(slots_->front().data(), kHeadBytes, kSlots);
}

MessageTransport::~MessageTransport() {
    if (::getpid() == owner_pid_)
        close_library();  // a forked child must not use the parent's library
}

void MessageTransport::send(uint32_t peer, const Frame& frame, std::span<const Load> loads) {
    if (peers_[peer].left) return;  // a rank that has left needs no more frames
    // After the end of the library, its buffers may no longer belong to this object.
    if (closed_.load(std::memory_order_relaxed))
        throw Error(Fault::aborted, "this communicator is closed");
    if (!is_p2p(frame.kind)) return post(peer, frame, loads);
    if (!is_callers(frame.kind)) return pack(peer, frame, loads, What::payload, 0);
    Peer& to = peers_[peer];
    to.leaving.push_back(false);
    pack(peer, frame, loads, What::callers, to.handed + to.leaving.size());
}

// Merges adjacent slots into one payload.
void MessageTransport::post(uint32_t peer, const Frame& frame, std::span<const Load> loads) {
    merged_.clear();
    for (const Load& load : loads) {
        if (!merged_.empty()) {
            Load& last = merged_.back();
            if (last.place + last.bytes == load.place && last.data + last.bytes == load.data) {
                last.bytes += load.bytes;
                continue;
            }
        }
        merged_.push_back(load);
    }
    std::span<const Load> rest = merged_;
    for (; rest.size() > kMostSpans; rest = rest.subspan(kMostSpans)) {
        Frame piece = frame;
        piece.kind = FrameKind::load;
        pack(peer, piece, rest.first(kMostSpans), What::payload, 0);
    }
    pack(peer, frame, rest, What::payload, 0);
}

void MessageTransport::pack(uint32_t peer, const Frame& frame, std::span<const Load> loads,
                            What what, uint64_t number) {
    if (free_buffers_.empty()) {
        free_buffers_.push_back(buffers_.size());
        buffers_.emplace_back();
    }
    const uint64_t buffer = free_buffers_.back();
    free_buffers_.pop_back();
    std::byte* const begin = buffers_[buffer].data();
    uint64_t payload = 0;
    for (const Load& load : loads) payload += load.bytes;
    const uint64_t spans = sizeof(Head) + loads.size() * sizeof(Span);
    Head head{frame, view_.rank(), static_cast<uint16_t>(loads.size()),
              spans + payload <= kHeadBytes};
    head.frame.bytes = payload;
    std::memcpy(begin, &head, sizeof(head));
    std::byte* at = begin + sizeof(head);
    for (const Load& load : loads) {
        const Span span{load.place, load.bytes};
        std::memcpy(at, &span, sizeof(span));
        at += sizeof(span);
    }
    if (head.inside) {
        for (const Load& load : loads) {
            if (load.bytes > 0) std::memcpy(at, load.data, load.bytes);
            at += load.bytes;
        }
    }
    start_transfer({What::head, peer, buffer}, [&](uint64_t ticket) {
        return library_->send_head(peer, begin, static_cast<uint64_t>(at - begin), ticket);
    });
    if (head.inside) {
        if (what == What::callers) settle_callers(peers_[peer], number);
        return;
    }
    for (const Load& load : loads) {
        start_transfer({what, peer, number}, [&](uint64_t ticket) {
            return library_->send(peer, load.data, load.bytes, ticket);
        });
    }
}

// Starts a transfer of the library. Its ticket ends at once if the library finishes the transfer at
// once, otherwise in a later poll.
template <class Call>
void MessageTransport::start_transfer(const Ticket& ticket, Call&& call) {
    const uint64_t number = issue(ticket);
    bool over = false;
    try {
        const std::lock_guard lock(library_mutex_);
        if (closed_) throw Error(Fault::aborted, "this communicator is closed");
        over = call(number);
    } catch (const Error& error) {
        retire(number);
        if (error.fault() == Fault::peer_lost && !parting_)
            receiver_.lost(ticket.peer, error.what());
        throw;
    }
    if (!over) return;
    retire(number);
    settle(ticket);
}

uint64_t MessageTransport::issue(const Ticket& ticket) {
    (ticket.what == What::arrival ? coming_ : unsent_).fetch_add(1, std::memory_order_relaxed);
    if (free_tickets_.empty()) {
        tickets_.push_back(ticket);
        return tickets_.size() - 1;
    }
    const uint64_t number = free_tickets_.back();
    free_tickets_.pop_back();
    tickets_[number] = ticket;
    return number;
}

void MessageTransport::retire(uint64_t ticket) {
    const bool arrival = tickets_[ticket].what == What::arrival;
    (arrival ? coming_ : unsent_).fetch_sub(1, std::memory_order_relaxed);
    free_tickets_.push_back(ticket);
}

void MessageTransport::settle(const Ticket& ticket) {
    Peer& peer = peers_[ticket.peer];
    switch (ticket.what) {
        case What::head:
            free_buffers_.push_back(ticket.of);
            return;
        case What::payload:
            return;
        case What::callers:
            return settle_callers(peer, ticket.of);
        case What::arrival:
            --peer.incoming[ticket.of - peer.incoming.front().number].missing;
            return;
    }
}

void MessageTransport::settle_callers(Peer& to, uint64_t number) {
    to.leaving[number - to.handed - 1] = true;
    for (; !to.leaving.empty() && to.leaving.front(); to.leaving.pop_front()) ++to.handed;
}

uint64_t MessageTransport::handed(uint32_t peer) const noexcept {
    return peers_[peer].handed;
}

// Polls the library. Returns true if there are results, which are kept for `handle`.
bool MessageTransport::poll_library() {
    if (closed_) return false;
    filled_ += library_->poll(ended_);
    return filled_ > 0 || !ended_.empty();
}

bool MessageTransport::poll() {
    rung_.store(false, std::memory_order_relaxed);
    {
        const std::lock_guard lock(library_mutex_);
        poll_library();
    }
    return handle();
}

// Takes the heads before the ends of transfers: a head may tell that the content of a payload that
// has ended is wrong.
bool MessageTransport::handle() {
    uint32_t filled = 0;
    std::vector<MessageLibrary::Ended> ended;
    {
        const std::lock_guard lock(library_mutex_);
        filled = std::exchange(filled_, 0);
        ended.swap(ended_);
    }
    for (uint32_t i = 0; i < filled; ++i) {
        if (!parting_) take((*slots_)[next_slot_].data());
        next_slot_ = (next_slot_ + 1) % kSlots;
        const std::lock_guard lock(library_mutex_);
        if (!closed_) library_->reuse();
    }
    for (const MessageLibrary::Ended& one : ended) end(one);
    return filled > 0 || !ended.empty();
}

void MessageTransport::end(const MessageLibrary::Ended& ended) {
    const Ticket ticket = tickets_[ended.ticket];
    retire(ended.ticket);
    if (parting_ && (ticket.what == What::arrival || !ended.why.empty())) return;
    if (!ended.why.empty()) return receiver_.lost(ticket.peer, ended.why);
    settle(ticket);
    if (ticket.what == What::arrival) advance(ticket.peer);
}

void MessageTransport::take(const std::byte* slot) {
    Head head{};
    std::memcpy(&head, slot, sizeof(head));
    if (head.from >= peers_.size() || view_.local(head.from) || head.spans > kMostSpans)
        throw Error(Fault::system, "received a message from rank " + std::to_string(head.from) +
                                       " with " + std::to_string(head.spans) +
                                       " payloads: expected a rank of another host with at most " +
                                       std::to_string(kMostSpans));
    Peer& from = peers_[head.from];
    if (from.gave_up) return;
    const bool gives_up = head.frame.kind == FrameKind::left && head.frame.loads != 0;
    if (gives_up && !from.incoming.empty()) {
        from.gave_up = true;
        return deliver(head.from, head.frame);
    }
    Incoming in = read(head, slot);
    if (head.frame.kind == FrameKind::failed && head.inside) {
        // Does not wait for payloads that are under way, because their content may be wrong.
        place(head.from, in);
        return deliver(head.from, in.frame);
    }
    in.number = from.came++;
    place(head.from, from.incoming.emplace_back(std::move(in)));
    advance(head.from);
}

// Reads the places of a frame's payloads.
MessageTransport::Incoming MessageTransport::read(const Head& head, const std::byte* slot) {
    Incoming in;
    in.frame = head.frame;
    in.spans.resize(head.spans);
    if (head.spans > 0)
        std::memcpy(in.spans.data(), slot + sizeof(head), head.spans * sizeof(Span));
    const uint64_t before = sizeof(head) + head.spans * sizeof(Span);
    const uint64_t most = head.inside ? kHeadBytes - before : head.frame.bytes;
    uint64_t payload = 0;
    for (const Span& span : in.spans) {
        if (span.bytes > most - payload)
            receiver_.nonsense(head.from, "payloads longer than their message");
        payload += span.bytes;
    }
    const bool shows = head.frame.kind == FrameKind::load || head.frame.kind == FrameKind::post;
    if (payload != head.frame.bytes || (!shows && head.spans > 1))
        receiver_.nonsense(head.from, "a message of " + std::to_string(head.frame.bytes) +
                                          " bytes with " + std::to_string(head.spans) +
                                          " payloads of " + std::to_string(payload) + " bytes");
    if (head.inside) in.inside = slot + before;
    return in;
}

// Delivers complete frames in the order in which they were sent.
void MessageTransport::advance(uint32_t peer) {
    auto& incoming = peers_[peer].incoming;
    while (!peers_[peer].gave_up && !incoming.empty() && incoming.front().placed &&
           incoming.front().missing == 0) {
        const Frame frame = incoming.front().frame;
        incoming.pop_front();
        deliver(peer, frame);
    }
}

// Copies the payloads that came with the head to their targets. Otherwise starts a receive into the
// target of each payload.
void MessageTransport::place(uint32_t peer, Incoming& in) {
    const std::byte* data = in.inside;
    Frame frame = in.frame;
    for (const Span& span : in.spans) {
        if (!is_p2p(frame.kind)) frame.place = span.place;
        frame.bytes = span.bytes;
        std::byte* const to = receiver_.place(peer, frame);
        if (data) {
            std::memcpy(to, data, span.bytes);
            data += span.bytes;
            continue;
        }
        ++in.missing;
        start_transfer({What::arrival, peer, in.number}, [&](uint64_t ticket) {
            return library_->receive(peer, to, span.bytes, ticket);
        });
    }
    in.placed = true;
}

void MessageTransport::deliver(uint32_t peer, const Frame& frame) {
    if (frame.kind == FrameKind::load) return;
    if (frame.kind == FrameKind::left) peers_[peer].left = true;
    receiver_.deliver(peer, frame);
}

Woken MessageTransport::sleep(double seconds, const std::function<bool()>& awake) {
    if (awake()) return Woken::rung;
    const auto began = Clock::now(), end = began + time_of(seconds);
    auto nap = kFirstNap;
    for (;;) {
        if (rung_.load(std::memory_order_acquire)) return Woken::rung;
        bool found = false;
        {
            // If the lock is not free, another thread polls.
            const std::unique_lock lock(library_mutex_, std::try_to_lock);
            found = lock.owns_lock() && poll_library();
        }
        if (found) return Woken::rung;
        const auto now = Clock::now();
        if (now >= end) return Woken::timed_out;
        const bool moving = unsent_.load(std::memory_order_relaxed) > 0 ||
                            coming_.load(std::memory_order_relaxed) > 0;
        if (now - began < (moving ? kSpinWhileMoving : kSpin)) {
            ::sched_yield();
            continue;
        }
        std::unique_lock lock(mutex_);
        doorbell_.wait_until(lock, std::min(end, now + nap), [this] { return rung_.load(); });
        nap = std::min(2 * nap, kLastNap);
    }
}

void MessageTransport::wake() noexcept {
    {
        const std::lock_guard lock(mutex_);
        rung_.store(true, std::memory_order_release);
    }
    doorbell_.notify_all();
}

bool MessageTransport::idle() const noexcept {
    return unsent_.load(std::memory_order_relaxed) == 0;
}

bool MessageTransport::reached(uint32_t peer) const noexcept {
    return !view_.local(peer);
}

}  // namespace unisono
