#include "p2p/remote_endpoint.h"

#include <algorithm>
#include <new>
#include <utility>

#include "kernels/kernels.h"

namespace unisono::p2p {

// ---- sender

void RemoteEndpoint::send_frame(FrameKind kind, uint64_t number, uint64_t place) {
    if (has_departed()) return;
    Frame frame{};
    frame.kind = kind;
    frame.number = number;
    frame.place = place;
    transport_.send(peer_, frame, {});
}

bool RemoteEndpoint::put(Request& send) {
    const uint64_t piece = std::min(send.message().bytes, kPiece);
    if (credit_ < piece + kOverhead) return false;
    const bool departed = has_departed();
    if (departed && piece < send.message().bytes) return false;
    credit_ -= piece + kOverhead;
    // Equals the behaviour on one host, where a small send to a departed rank completes at once.
    if (departed) {
        completion_.complete(send);
    } else {
        send_message(send, piece, false);
    }
    return true;
}

bool RemoteEndpoint::put_aside(Request& send) {
    asked_tag_.reset();
    send_message(send, 0, true);
    return true;
}

void RemoteEndpoint::send_message(Request& send, uint64_t piece, bool aside) {
    const Message& m = send.message();
    Frame frame{};
    frame.kind = FrameKind::message;
    frame.number = ++ids_;
    frame.place = m.tag;
    frame.progress = m.bytes;
    frame.loads = aside ? 1 : 0;
    frame.called.kind = static_cast<uint32_t>(m.dtype);
    const Load load{0, m.data, piece};
    send.moved = piece;
    const bool whole = piece == m.bytes;
    if (!whole) ungranted_.emplace(ids_, &send);
    leaving_.push_back({++left_frames_, whole ? &send : nullptr});
    try {
        transport_.send(peer_, frame,
                        {&load, 1});  // Even without bytes, because loads are placed in order.
    } catch (...) {                   // The caller ends the request.
        ungranted_.erase(ids_);
        leaving_.pop_back();
        throw;
    }
    progress();
}

void RemoteEndpoint::hold_back(uint64_t number) {
    send_frame(FrameKind::held, number);
}

void RemoteEndpoint::deny() {
    asked_tag_.reset();
    send_frame(FrameKind::denied, question_);
}

// Withdraws a message only if the peer has left and the transport does not use its memory any more.
bool RemoteEndpoint::withdraw(Request& send) noexcept {
    if (!has_departed()) return false;
    progress();
    if (!leaving_.empty() && !transport_.forget_messages(peer_)) return false;
    // From now on this endpoint sends nothing. The transport never counts the dropped frames as
    // handed over, so its count would be too low for later frames.
    ended_ = true;
    for (auto each = leaving_.begin(); each != leaving_.end();) {
        Request* const done = each->done;
        const bool small = done && done->message().bytes <= kPiece;
        if (done && !small && done != &send) {
            ++each;
            continue;
        }
        each = leaving_.erase(each);
        if (small) completion_.complete(*done);  // a small send to a departed rank succeeds
    }
    std::erase_if(ungranted_, [&](const auto& each) { return each.second == &send; });
    return !send.done();
}

// Completes the sends whose frames the transport has handed over.
bool RemoteEndpoint::progress() {
    const uint64_t handed = leaving_.empty() ? 0 : transport_.handed(peer_);
    bool moved = false;
    while (!leaving_.empty() && leaving_.front().number <= handed) {
        Request* const done = leaving_.front().done;
        leaving_.pop_front();
        if (done) completion_.complete(*done);
        moved = true;
    }
    return moved;
}

// ---- receiver

std::optional<Envelope> RemoteEndpoint::next() {
    if (arrivals_.empty()) return std::nullopt;
    const Envelope came = arrivals_.front();
    arrivals_.pop_front();
    return came;
}

bool RemoteEndpoint::accept(const Envelope& came, Request& receive) {
    Incoming& in = incoming_.at(came.id);
    // Comes before any change to `in`: if this throws, the caller ends the receive.
    grant(in);
    in.receive = &receive;
    if (!in.came) return true;
    try {
        settle(came.id, in);
    } catch (...) {  // the caller ends the receive
        in.receive = nullptr;
        throw;
    }
    return true;
}

void RemoteEndpoint::grant(Incoming& in) {
    if (in.granted || in.piece == in.envelope.bytes) return;
    in.granted = true;
    send_frame(FrameKind::grant, in.envelope.id);
}

// Delivers the first bytes, which have arrived, to the matched receive.
void RemoteEndpoint::settle(uint64_t id, Incoming& in) {
    Request* const receive = in.receive;
    if (!in.data.empty()) kernels::copy(receive->message().data, in.data.data(), in.data.size());
    if (std::exchange(in.credited, false)) {
        stored_ -= in.piece + kOverhead;
        give_back(in.piece + kOverhead);
    }
    in.data = {};
    if (in.piece < in.envelope.bytes) return;  // further bytes have not arrived
    incoming_.erase(id);
    completion_.complete(*receive);
}

// Returns credit to the sender. Collects credit to send few frames, but a sender that waits for
// credit gets all of it.
void RemoteEndpoint::give_back(uint64_t bytes) {
    owed_ += bytes;
    if (owed_ >= kCredit / 2 || (held_ != 0 && owed_ > 0))
        send_frame(FrameKind::credit, std::exchange(owed_, 0));
}

void RemoteEndpoint::ask(uint64_t tag) {
    answer_ = Answer::waiting;
    send_frame(FrameKind::question, ++questions_, tag);
}

Endpoint::Answer RemoteEndpoint::answer() {
    const bool final_answer = answer_ == Answer::found || answer_ == Answer::denied;
    return final_answer ? std::exchange(answer_, Answer::none) : answer_;
}

std::byte* RemoteEndpoint::place(const Frame& frame) {
    if (is_access(frame.kind)) return place_access(frame);
    if (frame.kind == FrameKind::data) {
        Incoming& in = incoming_of(frame);
        // The peer may send these bytes only once, and only after this rank has granted them.
        if (!std::exchange(in.granted, false) || frame.bytes != in.envelope.bytes - in.piece)
            members_.fail_nonsense(
                peer_, std::to_string(frame.bytes) + " bytes of a message without a grant");
        return in.receive->message().data + in.piece;
    }
    const uint64_t total = frame.progress;
    const bool aside = frame.loads != 0;
    if (frame.kind != FrameKind::message || frame.bytes > std::min(total, kPiece) ||
        incoming_.contains(frame.number) || frame.called.kind >= num_dtypes)
        members_.fail_nonsense(
            peer_, "a frame of kind " + std::to_string(static_cast<uint32_t>(frame.kind)) +
                       " with " + std::to_string(frame.bytes) + " of " + std::to_string(total) +
                       " bytes of type " + std::to_string(frame.called.kind) +
                       ": expected a new message");
    if (aside ? frame.bytes > 0 || answer_ != Answer::waiting
              : stored_ + frame.bytes + kOverhead > kCredit)
        members_.fail_nonsense(peer_, "a message for which it has no credit");
    Incoming& in = incoming_[frame.number];
    in.envelope = {peer_, frame.called.kind, frame.place, total, frame.number};
    in.piece = frame.bytes;
    in.credited = !aside;
    if (in.credited) stored_ += in.piece + kOverhead;
    in.data.resize(in.piece);
    // Announces the message before its first bytes have arrived. So the remaining bytes can be
    // granted while the first bytes arrive.
    arrivals_.push_back(in.envelope);
    if (aside) answer_ = Answer::found;
    return in.data.empty() ? &nowhere_ : in.data.data();
}

RemoteEndpoint::Incoming& RemoteEndpoint::incoming_of(const Frame& frame) {
    const auto found = incoming_.find(frame.number);
    if (found == incoming_.end())
        members_.fail_nonsense(
            peer_, "bytes of message " + std::to_string(frame.number) + ", which is unknown");
    return found->second;
}

void RemoteEndpoint::deliver(const Frame& frame) {
    if (is_access(frame.kind)) return deliver_access(frame);
    switch (frame.kind) {
        case FrameKind::message: {
            // Some transports do not call place() for a frame without bytes.
            if (!incoming_.contains(frame.number)) place(frame);
            Incoming& in = incoming_of(frame);
            in.came = true;
            if (in.receive) settle(frame.number, in);
            return;
        }
        case FrameKind::data: {
            if (frame.bytes == 0) place(frame);
            Request* const receive = incoming_of(frame).receive;
            incoming_.erase(frame.number);
            return completion_.complete(*receive);
        }
        case FrameKind::grant: {
            const auto found = ungranted_.find(frame.number);
            if (found == ungranted_.end() && ended_) return;  // the send was withdrawn
            if (found == ungranted_.end())
                members_.fail_nonsense(peer_, "a grant for message " +
                                                  std::to_string(frame.number) +
                                                  ", which is not waiting for a grant");
            Request* const send = found->second;
            ungranted_.erase(found);
            const Message& m = send->message();
            Frame data{};
            data.kind = FrameKind::data;
            data.number = frame.number;
            const Load load{0, m.data + send->moved, m.bytes - send->moved};
            leaving_.push_back({++left_frames_, send});
            return transport_.send(peer_, data, {&load, 1});
        }
        case FrameKind::credit:
            credit_ = std::min(kCredit, credit_ + std::min(kCredit, frame.number));
            return;
        case FrameKind::question:
            question_ = frame.number;
            asked_tag_ = frame.place;
            return;
        case FrameKind::denied:
            if (frame.number == questions_ && answer_ == Answer::waiting) answer_ = Answer::denied;
            return;
        case FrameKind::held:
            held_ = frame.number;
            return give_back(0);
        case FrameKind::left:
            return end();
        default:
            members_.fail_nonsense(peer_, "a frame of kind " +
                                              std::to_string(static_cast<uint32_t>(frame.kind)) +
                                              ": expected a frame of a point-to-point message");
    }
}

// If the transport could not stop its transfers, it may still use the memory of all unfinished
// messages, also the memory of messages that no receive matches.
void RemoteEndpoint::fail(const Error& error, Deadline&) noexcept {
    const auto end = [&](Request* request) {
        if (!request) return;
        if (keeps_memory_) request->keep_memory();
        request->failed(error);
        completion_.complete(*request);
    };
    for (; !leaving_.empty(); leaving_.pop_front()) end(leaving_.front().done);
    for (const auto& [id, send] : std::exchange(ungranted_, {})) end(send);
    for (const auto& [id, get] : std::exchange(gets_, {})) end(get);
    auto incoming = std::exchange(incoming_, {});
    for (const auto& [id, in] : incoming) end(in.receive);
    if (keeps_memory_) static_cast<void>(new (std::nothrow) auto(std::move(incoming)));
    arrivals_.clear();
}

}  // namespace unisono::p2p
