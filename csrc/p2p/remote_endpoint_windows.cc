// One-sided access to windows of a peer on another host, and the peer's access to this rank's
// windows.
#include <algorithm>
#include <string>

#include "p2p/remote_endpoint.h"

namespace unisono::p2p {

// ---- to the peer's windows

void RemoteEndpoint::put_to(Request& put, uint64_t window, uint64_t at) {
    Frame frame{};
    frame.kind = FrameKind::put;
    frame.number = window;
    frame.place = at;
    send_memory(frame, put.message().data, put.message().bytes, &put);
}

void RemoteEndpoint::get_from(Request& get, uint64_t window, uint64_t at) {
    Frame frame{};
    frame.kind = FrameKind::get;
    frame.number = ++gets_sent_;
    frame.loads = static_cast<uint32_t>(window);
    frame.place = at;
    frame.progress = get.message().bytes;
    gets_.emplace(gets_sent_, &get);
    try {
        transport_.send(peer_, frame, {});
    } catch (...) {  // the caller ends the request
        gets_.erase(gets_sent_);
        throw;
    }
}

void RemoteEndpoint::signal(uint64_t window) {
    send_frame(FrameKind::signal, window);
}

// Sends a frame whose payload the transport reads in place: the memory of a put, or an array of a
// window. `done` is the request that completes when the transport has read it, or nullptr.
void RemoteEndpoint::send_memory(const Frame& frame, std::byte* data, uint64_t bytes,
                                 Request* done) {
    const Load load{frame.place, data, bytes};
    leaving_.push_back({++left_frames_, done});
    try {
        transport_.send(peer_, frame, {&load, 1});
    } catch (...) {  // the caller ends the request
        leaving_.pop_back();
        throw;
    }
}

// ---- to this rank's windows

// Returns the memory that a frame of one-sided access fills.
std::byte* RemoteEndpoint::place_access(const Frame& frame) {
    if (frame.kind == FrameKind::put) return served(frame.number, frame.place, frame.bytes);
    std::byte* const to = get_of(frame).message().data;
    return to ? to : &nowhere_;  // a fence asks for no bytes
}

void RemoteEndpoint::deliver_access(const Frame& frame) {
    switch (frame.kind) {
        case FrameKind::put:
            served(frame.number, frame.place, frame.bytes);
            return;
        case FrameKind::got: {
            Request& get = get_of(frame);
            gets_.erase(frame.number);
            return completion_.complete(get);
        }
        case FrameKind::get: {
            std::byte* const from = served(frame.loads, frame.place, frame.progress);
            Frame answer{};
            answer.kind = FrameKind::got;
            answer.number = frame.number;
            return send_memory(answer, from, frame.progress, nullptr);
        }
        default:
            served(frame.number, 0, 0);
            signal_word(windows_.find(frame.number)->signals, peer_)
                .fetch_add(1, std::memory_order_release);
    }
}

// Returns memory of a window that this rank serves.
std::byte* RemoteEndpoint::served(uint64_t number, uint64_t at, uint64_t bytes) {
    const ServedWindow* const window = windows_.find(number);
    if (!window)
        members_.fail_nonsense(
            peer_, "an access to window " + std::to_string(number) + ", which is not open");
    if (at > window->bytes || bytes > window->bytes - at)
        members_.fail_nonsense(peer_, "an access to " + std::to_string(bytes) + " bytes at " +
                                          std::to_string(at) + " of an array of " +
                                          std::to_string(window->bytes) + " bytes");
    return window->array + at;
}

Request& RemoteEndpoint::get_of(const Frame& frame) {
    const auto found = gets_.find(frame.number);
    if (found == gets_.end() || frame.bytes != found->second->message().bytes)
        members_.fail_nonsense(peer_, std::to_string(frame.bytes) + " bytes for get " +
                                          std::to_string(frame.number) +
                                          ", which did not ask for them");
    return *found->second;
}

}  // namespace unisono::p2p
