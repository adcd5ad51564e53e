#include "p2p/message_engine.h"

#include <algorithm>
#include <utility>

#include "core/call.h"
#include "p2p/remote_endpoint.h"
#include "p2p/self_endpoint.h"
#include "p2p/shm_endpoint.h"

namespace unisono::p2p {

Engine::Engine(View& view, Membership& members, Waiter waiter, CrossMemory& cross_memory,
               OperationCounters& counters, const MakeTransport& make_transport)
    : view_(view),
      members_(members),
      waiter_(waiter),
      counters_(counters),
      transport_(make_transport ? make_transport(*this) : nullptr),
      peers_(members.ranks()),
      remotes_(members.ranks()),
      matcher_(members.ranks()) {
    Completion& completion = *this;
    for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
        auto& endpoint = peers_[rank].endpoint;
        if (rank == members.rank()) {
            endpoint = std::make_unique<SelfEndpoint>(rank, completion);
        } else if (view.local(rank)) {
            endpoint = std::make_unique<ShmEndpoint>(view, members, cross_memory, completion, rank,
                                                     single_copy_, waiter.oversubscribed());
        } else {
            auto remote =
                std::make_unique<RemoteEndpoint>(members, *transport_, completion, windows_, rank);
            remotes_[rank] = remote.get();
            endpoint = std::move(remote);
        }
    }
}

Engine::~Engine() {
    stop();
}

// ---- start

// Throws Error for a request that cannot begin, and marks the request as done.
void Engine::check(Request& request) const {
    try {
        members_.require_healthy();
        const int32_t peer = request.message().peer;
        if (!request.sends() && peer == kAnySource) return;
        if (static_cast<uint32_t>(peer) >= peers_.size())
            throw Error(Fault::invalid,
                        message_text(request.sends(), peer) + ": expected a rank from 0 to " +
                            std::to_string(peers_.size() - 1) + ", got " + std::to_string(peer));
    } catch (const std::exception& error) {
        request.failed(error_of(error));
        request.set_done();
        throw;
    }
}

void Engine::begin(Request& request, bool in_background) {
    check(request);
    const std::lock_guard lock(mutex_);
    begin_locked(request, in_background);
}

bool Engine::try_begin(Request& request, bool in_background) {
    check(request);
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) begin_locked(request, in_background);
    return lock.owns_lock();
}

void Engine::begin_locked(Request& request, bool in_background) {
    start(request, [&] {
        request.sends() ? begin_send(request) : begin_receive(request);
        if (in_background && !request.done()) wake_progress_thread();
    });
}

void Engine::begin_send(Request& send) {
    Peer& peer = peers_[static_cast<size_t>(send.message().peer)];
    if (peer.held.empty() && peer.endpoint->put(send)) {
        if (static_cast<uint32_t>(send.message().peer) == members_.rank()) advance(peer);
        return;
    }
    peer.held.push_back(&send);
    peer.endpoint->hold_back(++peer.holds);
}

void Engine::begin_receive(Request& receive) {
    const Message& m = receive.message();
    while (const Envelope* const found = matcher_.find_unexpected(m.peer, m.tag)) {
        if (accept(matcher_.take(found), receive)) return;
    }
    matcher_.post(receive);
    poll_for(receive);
}

// Moves a message into a receive that matches it. Returns false if the sender has withdrawn the
// message.
bool Engine::accept(const Envelope& came, Request& receive) {
    const Message& m = receive.message();
    const bool fit = static_cast<uint32_t>(m.dtype) == came.kind && m.bytes == came.bytes;
    if (!fit && !peers_[came.source].endpoint->claim(came)) return false;
    if (!fit) fail_mismatch(came, receive);
    receive.matched(static_cast<int32_t>(came.source), came.tag);
    if (peers_[came.source].endpoint->accept(came, receive)) return true;
    receive.matched(m.peer, m.tag);
    return false;
}

void Engine::fail_mismatch(const Envelope& came, const Request& receive) {
    const Message& m = receive.message();
    const auto dtype = static_cast<DType>(came.kind);
    members_.fail(Fault::mismatch,
                  "rank " + std::to_string(came.source) + " sent " + std::to_string(came.bytes) +
                      " bytes (" + std::to_string(came.bytes / size_of(dtype)) +
                      " elements of type " + name_of(dtype) + ") with tag " +
                      std::to_string(came.tag) + ", but rank " + std::to_string(members_.rank()) +
                      " receives " + std::to_string(m.bytes) + " bytes (" +
                      std::to_string(m.bytes / size_of(m.dtype)) + " elements of type " +
                      name_of(m.dtype) + ")");
}

// ---- progress

// Fails the group if a rank that should be alive is gone. Requires the lock.
void Engine::make_slow_checks() {
    guarded([&] {
        waiter_.make_slow_checks({});
        return true;
    });
}

// Records an error for all ranks, unless this rank has left the group. An error after that concerns
// no other rank.
void Engine::record(const Error& error) noexcept {
    if (!members_.closed()) members_.record(error.fault(), error.what());
}

bool Engine::poll() {
    polls_.store(polls_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    return guarded([this] {
        bool moved = transport_ && transport_->poll();
        for (Peer& peer : peers_) moved |= advance(peer);
        return moved;
    });
}

// Polls only the peers that may complete this request.
bool Engine::poll_for(const Request& request) {
    const int32_t rank = request.message().peer;
    if (rank == kAnySource || remotes_[static_cast<size_t>(rank)]) return poll();
    return guarded([&] { return advance(peers_[static_cast<size_t>(rank)]); });
}

bool Engine::advance(Peer& peer) {
    bool moved = peer.endpoint->progress();
    if (!peer.held.empty()) moved |= advance_held(peer);
    if (peer.endpoint->asked()) moved |= answer(peer);
    if (!matcher_.posted().empty()) moved |= advance_arrivals(peer);
    return moved;
}

bool Engine::advance_held(Peer& peer) {
    bool moved = false;
    while (!peer.held.empty()) {
        Request* const send = peer.held.front();
        // This may complete the request, and its owner may then destroy it.
        if (!peer.endpoint->put(*send)) break;
        peer.held.pop_front();
        moved = true;
    }
    if (peer.held.empty()) peer.endpoint->hold_back(0);
    return moved;
}

// Answers the peer's question for a held-back message.
bool Engine::answer(Peer& peer) {
    const auto tag = peer.endpoint->asked();
    const auto found = std::find_if(peer.held.begin(), peer.held.end(), [&](const Request* send) {
        return fits(kAnySource, *tag, {0, 0, send->message().tag, 0, 0});
    });
    if (found == peer.held.end()) {
        peer.endpoint->deny();
        return true;
    }
    if (!peer.endpoint->put_aside(**found)) return false;
    peer.held.erase(found);
    if (peer.held.empty()) peer.endpoint->hold_back(0);
    return true;
}

bool Engine::advance_arrivals(Peer& peer) {
    bool moved = false;
    const auto take = [&] {
        while (!matcher_.posted().empty()) {
            const auto came = peer.endpoint->next();
            if (!came) return;
            moved = true;
            Request* const receive = matcher_.find_posted(*came);
            if (!receive) {
                matcher_.store(*came);
            } else if (accept(*came, *receive)) {
                matcher_.withdraw(*receive);
            }
        }
    };
    take();
    const auto rank = static_cast<uint32_t>(&peer - peers_.data());
    if (peer.endpoint->held() != 0 && ask(rank, peer)) take();
    return moved;
}

// Asks the peer for a held-back message if the room is full of messages that no receive matches.
// Asks for the tag of each posted receive, one after the other, and for the tag of a probe, until
// the peer has denied them all. Returns true if an answer has arrived.
bool Engine::ask(uint32_t rank, Peer& peer, std::optional<uint64_t> probed) {
    switch (peer.endpoint->answer()) {
        case Endpoint::Answer::waiting:
            return false;
        case Endpoint::Answer::found:
            peer.asked_holds = 0;  // start again from the first receive
            return true;
        case Endpoint::Answer::denied:
            ++peer.next_question;
            break;
        case Endpoint::Answer::none:
            break;
    }
    // All messages that have arrived are matched, so room becomes free without a question.
    if (matcher_.unexpected_of(rank) == 0) return false;
    // If the peer holds back a new message, or a receive is posted or removed, the peer may have a
    // message that it denied before. The questions then start again.
    const uint64_t holds = peer.endpoint->held(), changes = matcher_.changes();
    if (peer.asked_holds != holds || peer.asked_changes != changes ||
        (probed && peer.asked_probed != probed))
        peer.next_question = 0;
    peer.asked_holds = holds;
    peer.asked_changes = changes;
    if (probed) peer.asked_probed = probed;
    const auto& posted = matcher_.posted();
    for (; peer.next_question < posted.size(); ++peer.next_question) {
        const Message& m = posted[peer.next_question]->message();
        if (m.peer != kAnySource && m.peer != static_cast<int32_t>(rank)) continue;
        peer.endpoint->ask(m.tag);
        return false;
    }
    if (probed && peer.next_question == posted.size()) peer.endpoint->ask(*probed);
    return false;
}

// ---- end

void Engine::complete(Request& request) noexcept {
    --under_way_;
    if (!request.error() && !request.message().one_sided) count(request);
    request.set_done();
    wake_waiting_threads();
}

// Wakes the threads of this rank that sleep until a request is done or a signal has arrived.
void Engine::wake_waiting_threads() noexcept {
    ring(view_.own().p2p, transport_ ? Fence::full : view_.fence());
    if (away_sleepers_.load(std::memory_order_seq_cst) > 0) transport_->wake();
}

bool Engine::cancel(Request& request) {
    members_.require_own_process();
    const std::lock_guard lock(mutex_);
    if (request.done()) return false;
    return take_back(request, Error(Fault::invalid, text_of(request) + " was cancelled"));
}

// Counts a message that has succeeded. A message of a rank to itself moves no bytes. Requires the
// lock.
void Engine::count(const Request& request) noexcept {
    const bool moves = request.source() != static_cast<int32_t>(members_.rank());
    const uint64_t bytes = moves ? request.message().bytes : 0;
    counters_.add(request.sends() ? CallVolume{kSendRow, 1, bytes, 0}
                                  : CallVolume{kReceiveRow, 1, 0, bytes});
}

// Ends a request of which no bytes have moved. Returns false if it is too late. Requires the lock.
bool Engine::take_back(Request& request, const Error& error) {
    bool held = false;
    const auto withdraw = [&] {
        if (!request.sends()) return matcher_.withdraw(request);
        Peer& peer = peers_[static_cast<size_t>(request.message().peer)];
        held = std::erase(peer.held, &request) > 0;
        return held || peer.endpoint->withdraw(request);
    };
    if (!withdraw()) return false;
    const auto to = static_cast<size_t>(request.message().peer);
    request.failed(error);
    complete(request);
    if (!held || !peers_[to].held.empty()) return true;
    return guarded([&] {
        peers_[to].endpoint->hold_back(0);
        return true;
    });
}

std::optional<Envelope> Engine::probe(int32_t source, uint64_t tag) {
    members_.require_healthy();
    const std::lock_guard lock(mutex_);
    const Envelope* found = nullptr;
    inspect(inspected_);
    guarded([&] {
        if (transport_) transport_->poll();
        for (uint32_t rank = 0; rank < peers_.size() && !found; ++rank) {
            if (source != kAnySource && source != static_cast<int32_t>(rank)) continue;
            Peer& peer = peers_[rank];
            peer.endpoint->progress();
            do {
                found = find(peer, source, tag);
            } while (!found && peer.endpoint->held() != 0 && ask(rank, peer, tag));
        }
        return true;
    });
    return found ? std::optional(*found) : std::nullopt;
}

// Takes arrivals from a peer until one of them matches a probe.
const Envelope* Engine::find(Peer& peer, int32_t source, uint64_t tag) {
    for (;;) {
        if (const Envelope* const found = matcher_.find_unexpected(source, tag)) {
            if (peers_[found->source].endpoint->claim(*found)) return found;
            matcher_.take(found);
            continue;
        }
        const auto came = peer.endpoint->next();
        if (!came) return nullptr;
        if (Request* const receive = matcher_.find_posted(*came)) {
            if (accept(*came, *receive)) matcher_.withdraw(*receive);
        } else {
            matcher_.store(*came);
        }
    }
}

bool Engine::idle() const noexcept {
    return under_way_ == 0 && (windows_.empty() || members_.failed());
}

std::string Engine::text_of(const Request& request) {
    const Message& m = request.message();
    if (m.one_sided)
        return std::string(request.sends() ? "put to" : "get from") + " rank " +
               std::to_string(m.peer) + " (" + std::to_string(m.bytes) + " bytes)";
    return message_text(request.sends(), m.peer) + " (" + std::to_string(m.bytes) + " bytes, " +
           (m.tag == kAnyTag ? std::string("any tag") : "tag " + std::to_string(m.tag)) + ")";
}

// ---- messages from other hosts

std::byte* Engine::place(uint32_t peer, const Frame& frame) {
    if (frame.kind == FrameKind::failed) {
        if (std::byte* const text = fault_reports_.place(peer, frame)) return text;
    }
    return remotes_[peer]->place(frame);
}

void Engine::deliver(uint32_t peer, const Frame& frame) {
    if (frame.kind == FrameKind::failed) {
        const Error error = fault_reports_.read(peer, frame);
        members_.fail(error.fault(), error.what());
    }
    remotes_[peer]->deliver(frame);
    if (frame.kind == FrameKind::signal) wake_waiting_threads();
}

void Engine::lost(uint32_t peer, const std::string& why) {
    if (remotes_[peer]->has_ended()) return;
    remotes_[peer]->end();
    if (!view_.has_left(peer)) members_.fail_gone(peer, why);
}

}  // namespace unisono::p2p
