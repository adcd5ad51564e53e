// What carries a rank's posts and messages to ranks of other hosts: frames, and who moves them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "core/call.h"
#include "core/error.h"
#include "core/futex.h"

namespace unisono {

enum class FrameKind : uint8_t {
    load = 1,     // a piece of what a post shows
    post = 2,     // progress, after everything that it shows
    left = 3,     // the sender closes the group in good order: the last frame
    message = 4,  // point-to-point: its first bytes; see p2p/wire_endpoint.h
    // The sender's group has failed: its fault, and the text as payload; the last frame.
    failed = 5,
    data = 6,       // the rest of message `number`, which was granted
    grant = 7,      // message `number` is asked for
    credit = 8,     // `number` bytes that nobody may have asked for
    held = 9,       // messages wait: `number` changes with each; 0: none
    question = 10,  // is one with the tag `place` among them?
    denied = 11,    // question `number`: there is none
};

// Whether a frame is of point-to-point messages. All of those go by one connection, in their order.
[[nodiscard]] constexpr bool is_p2p(FrameKind kind) noexcept {
    return kind == FrameKind::message || kind >= FrameKind::data;
}
// Whether its payload is in the callers' memory: `Wire::handed` counts these.
[[nodiscard]] constexpr bool is_callers(FrameKind kind) noexcept {
    return kind == FrameKind::message || kind == FrameKind::data;
}

// The head of a frame; `bytes` of payload follow it. Little endian.
struct Frame {
    FrameKind kind;
    uint8_t size_class;  // load, post: which of the sender's areas the payload belongs to
    uint8_t pad[2];
    uint32_t loads;     // post: frames of kind load that belong to it
    uint64_t number;    // load, post: of the post, counted from 1; p2p: see there
    uint64_t place;     // load, post: offset in the areas of the strip; message: the tag
    uint64_t bytes;     // of the payload
    uint64_t progress;  // post: the sender's; message: all its bytes
    LastCall called;  // post: the sender's call; message, failed: only the type, or fault, as kind
};
static_assert(sizeof(Frame) == 80);

// Memory that one rank shows to another.
struct Load {
    uint64_t place;
    const std::byte* data;
    uint64_t bytes;
};

// Who takes what a wire brings. Both are called by the thread that moves the wire.
class Receiver {
  public:
    virtual ~Receiver() = default;
    // Where the payload goes. Throws Error if the frame makes no sense.
    virtual std::byte* place(uint32_t peer, const Frame& frame) = 0;
    // All of the frame is there, and all that was sent before it.
    virtual void deliver(uint32_t peer, const Frame& frame) = 0;
    // The connection has ended. Throws Error unless that was to be expected.
    virtual void lost(uint32_t peer, const std::string& why) = 0;
    // The peer sent what no peer sends: "rank 3 sent " and `what`. Throws Error.
    [[noreturn]] virtual void nonsense(uint32_t peer, const std::string& what) = 0;
};

// One thread at a time moves a wire.
class Wire {
  public:
    virtual ~Wire() = default;
    // Hands over a frame with its loads. Their memory stays as it is until the peer has answered by
    // progress, or `handed` has counted the frame.
    virtual void send(uint32_t peer, const Frame& frame, std::span<const Load> loads) = 0;
    // Frames to the peer, of those with callers' memory, that need it no more.
    [[nodiscard]] virtual uint64_t handed(uint32_t peer) const noexcept = 0;
    // Moves what can be moved without waiting; true if anything came.
    virtual bool poll() = 0;
    // Sleeps, unless `awake()`, until something may move, or the time is over, or somebody wakes
    // it. Several threads may sleep at once: each of them wakes.
    virtual Woken sleep(double seconds, const std::function<bool()>& awake) = 0;
    virtual void wake() noexcept = 0;
    // After a failure: gives up the messages that are not handed over. True: their memory is the
    // callers' again; else it may be used until the process ends.
    [[nodiscard]] virtual bool forget_messages() noexcept = 0;
    // The same for those to a peer that has left.
    virtual bool forget_messages(uint32_t peer) noexcept = 0;
    // Nothing is left to be sent. For any thread.
    [[nodiscard]] virtual bool idle() const noexcept = 0;
    // Whether callers' memory is among what is left to be sent.
    [[nodiscard]] virtual bool reads_in_place() const noexcept = 0;
    // Whether what is under way needs this rank to look while it waits for something else. A
    // library may hold what it says it has sent until somebody looks.
    [[nodiscard]] virtual bool needs_looks() const noexcept { return !idle(); }
    // Whether there is, or was, a connection to the peer.
    [[nodiscard]] virtual bool reached(uint32_t peer) const noexcept = 0;
    // Says in good order that this rank leaves; does not wait.
    virtual void part() noexcept = 0;
    // After `part`: moves what is left to be sent; whether the others have all of it, or need none.
    [[nodiscard]] virtual bool parted() noexcept = 0;
    // The end of it, after `part` or after `failure`, and says that. Any thread may still wake it.
    virtual void close(const std::optional<Error>& failure) noexcept = 0;
};

}  // namespace unisono
