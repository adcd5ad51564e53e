// One send or receive: the request and its result.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "core/error.h"
#include "core/types.h"

namespace unisono::p2p {

inline constexpr int32_t kAnySource = -1;
// The first of the tags that are reserved for the library. A receive of any tag does not match
// reserved tags.
inline constexpr uint64_t kOwnTags = 1ULL << 63;
inline constexpr uint64_t kAnyTag = ~0ULL;

struct Message {
    std::byte* data;
    uint64_t bytes;
    DType dtype;
    int32_t peer;            // Destination or source, or kAnySource.
    uint64_t tag;            // The tag, or kAnyTag.
    bool one_sided = false;  // a put or a get instead of a send or a receive
};

// A send or a receive. The caller that begins a request keeps the request and its memory until the
// request is done, and the memory of a request that `needs_memory` until the process ends.
class Request {
  public:
    Request(Message message, bool sends) noexcept
        : message_(std::move(message)), sends_(sends), source_(message_.peer), tag_(message_.tag) {}
    Request(const Request&) = delete;
    Request& operator=(const Request&) = delete;

    [[nodiscard]] const Message& message() const noexcept { return message_; }
    [[nodiscard]] bool sends() const noexcept { return sends_; }
    [[nodiscard]] bool done() const noexcept { return done_.load(std::memory_order_acquire); }
    // Only for a request that is done:
    [[nodiscard]] const std::optional<Error>& error() const noexcept { return error_; }
    // Returns true if the request has failed, but another process or a transport may still use its
    // memory.
    [[nodiscard]] bool needs_memory() const noexcept { return needs_memory_; }
    // The source and the tag of the matched message, or the requested source and tag before the
    // match. The source of a send is its destination.
    [[nodiscard]] int32_t source() const noexcept {
        return source_.load(std::memory_order_relaxed);
    }
    [[nodiscard]] uint64_t tag() const noexcept { return tag_.load(std::memory_order_relaxed); }

    // Only for the engine and its endpoints, which hold the engine's lock:
    void matched(int32_t source, uint64_t tag) noexcept {
        source_.store(source, std::memory_order_relaxed);
        tag_.store(tag, std::memory_order_relaxed);
    }
    void failed(const Error& error) noexcept { error_ = error; }
    void keep_memory() noexcept { needs_memory_ = true; }
    // Marks the request as done. This is the last access to the request, because its owner may
    // destroy it at once.
    void set_done() noexcept { done_.store(true, std::memory_order_release); }
    // Prepares another start of a request that is not pending.
    void restart() noexcept {
        source_.store(message_.peer, std::memory_order_relaxed);
        tag_.store(message_.tag, std::memory_order_relaxed);
        moved = 0;
        error_.reset();
        done_.store(false, std::memory_order_relaxed);
    }

    uint64_t moved = 0;  // Bytes moved so far, if an endpoint moves the message in parts.
    std::chrono::steady_clock::time_point inspected;  // Time of the last check by `test`.

  private:
    const Message message_;
    const bool sends_;
    std::atomic<int32_t> source_;
    std::atomic<uint64_t> tag_;
    std::optional<Error> error_;
    bool needs_memory_ = false;
    std::atomic<bool> done_{false};
};

}  // namespace unisono::p2p
