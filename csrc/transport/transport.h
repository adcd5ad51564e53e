// The interface between a rank and the ranks of other hosts: frames, and the transport that moves
// them.
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
    load = 1,     // Some of the data of a post.
    post = 2,     // A rank's new progress; all data of the post are sent before it.
    left = 3,     // The sender closes the group without a failure; its last frame.
    message = 4,  // Point-to-point: the first bytes of a message; see p2p/remote_endpoint.h.
    // The sender's group has failed. The frame holds the fault, and the text as its payload. It is
    // the sender's last frame.
    failed = 5,
    // The bytes of message `number` after the first ones, sent after a grant.
    data = 6,
    // Asks for the bytes of message `number` after the first ones.
    grant = 7,
    credit = 8,  // Gives `number` bytes of credit for eager messages.
    // Tells that messages are held back: `number` changes with each new one, and is 0 if there is
    // none.
    held = 9,
    question = 10,  // Asks for a held-back message with the tag `place`.
    denied = 11,    // Answers question `number`: no held-back message has the tag.
    // One-sided access to a window of the receiver.
    put = 12,     // Bytes for the array of window `number`, from byte `place` on.
    get = 13,     // Get `number`: asks for `progress` bytes of window `loads`, from `place` on.
    got = 14,     // The bytes that get `number` asks for.
    signal = 15,  // A signal of the sender for window `number`.
};

// Returns true for frames of messages and of one-sided access. All these frames to a peer use one
// connection, in order.
[[nodiscard]] constexpr bool is_p2p(FrameKind kind) noexcept {
    return kind == FrameKind::message || kind >= FrameKind::data;
}
// Returns true for frames of one-sided access.
[[nodiscard]] constexpr bool is_access(FrameKind kind) noexcept {
    return kind >= FrameKind::put && kind <= FrameKind::signal;
}
// Returns true if the payload of these frames is in callers' memory or in arrays of windows.
// `Transport::handed`
// counts the frames of these kinds only.
[[nodiscard]] constexpr bool is_callers(FrameKind kind) noexcept {
    return kind == FrameKind::message || kind == FrameKind::data || kind == FrameKind::put ||
           kind == FrameKind::got;
}

// The head of a frame, in little endian. `bytes` of payload follow the head.
struct Frame {
    FrameKind kind;
    uint8_t size_class;  // load, post: the sender's size class of staging buffers
    uint8_t pad[2];
    // Post: number of its `load` frames. Message: 1 if it answers a question. Left: 1 if the sender
    // gives up messages to the receiver, so the content of messages that come later may be wrong.
    uint32_t loads;
    uint64_t number;    // Load, post: number of the post, from 1; others: see FrameKind.
    uint64_t place;     // Load, post: offset in the staging buffers; message, question: tag.
    uint64_t bytes;     // Bytes of the payload.
    uint64_t progress;  // Post: the sender's progress; message: bytes of the whole message.
    // Post: the sender's most recent call. Message: only `kind` is set, to the element type.
    // Failed: only `kind` is set, to the fault.
    LastCall called;
};
static_assert(sizeof(Frame) == 80);

// Memory that a post or a message sends.
struct Load {
    uint64_t place;
    const std::byte* data;
    uint64_t bytes;
};

// The receiver of a transport's frames. The thread that polls the transport calls these functions.
class Receiver {
  public:
    virtual ~Receiver() = default;
    // Returns the address to which the transport must write the frame's payload. Throws Error if
    // the frame is invalid.
    virtual std::byte* place(uint32_t peer, const Frame& frame) = 0;
    // Takes a frame that has arrived completely. The frames of one peer are delivered in the order
    // in which they were sent.
    virtual void deliver(uint32_t peer, const Frame& frame) = 0;
    // Handles the end of a connection. Throws Error unless the end was expected.
    virtual void lost(uint32_t peer, const std::string& why) = 0;
    // Reports invalid input from a peer: "rank 3 sent " and `what`. Throws Error.
    [[noreturn]] virtual void nonsense(uint32_t peer, const std::string& what) = 0;
};

// A connection to all ranks of other hosts. Only one thread at a time makes its progress.
class Transport {
  public:
    virtual ~Transport() = default;
    // Sends a frame with its loads. The caller must not change the memory of the loads until the
    // peer has acknowledged them by its progress, or, for point-to-point frames, until `handed` has
    // counted the frame.
    virtual void send(uint32_t peer, const Frame& frame, std::span<const Load> loads) = 0;
    // Returns the number of frames to the peer that no longer need the callers' memory.
    [[nodiscard]] virtual uint64_t handed(uint32_t peer) const noexcept = 0;
    // Makes all progress that is possible without waiting. Returns true if anything arrived.
    virtual bool poll() = 0;
    // Sleeps, unless `awake()` returns true, until progress may be possible, `seconds` have passed,
    // or a thread calls `wake`. Several threads may sleep at once; `wake` wakes all of them.
    virtual Woken sleep(double seconds, const std::function<bool()>& awake) = 0;
    virtual void wake() noexcept = 0;
    // After `failure`, drops all messages that were not yet handed over to the network, and stops
    // receives into callers' memory. Tells the failure to the receivers of messages that cannot be
    // dropped, because the content of these messages may change. Returns true if the callers may
    // reuse the memory. Otherwise the memory may be in use until the process ends.
    [[nodiscard]] virtual bool forget_messages(const Error& failure) noexcept = 0;
    // Drops the messages to a peer that has left.
    virtual bool forget_messages(uint32_t peer) noexcept = 0;
    // Returns true if nothing is left to send. Any thread may call this.
    [[nodiscard]] virtual bool idle() const noexcept = 0;
    // Returns true if pending transfers need this rank to poll during other waits. A message
    // library may report a transfer as sent, but send the data only at the next poll.
    [[nodiscard]] virtual bool needs_polling() const noexcept { return !idle(); }
    // Returns true if there is, or was, a connection to the peer.
    [[nodiscard]] virtual bool reached(uint32_t peer) const noexcept = 0;
    // Announces that this rank leaves without a failure, and ignores later input. Does not wait.
    // Returns false if messages still use the callers' memory. `close` must then follow at once.
    [[nodiscard]] virtual bool part() noexcept = 0;
    // Sends the remaining data after `part`. Returns true once every peer has received all data or
    // needs no more.
    [[nodiscard]] virtual bool parted() noexcept = 0;
    // Closes the transport after `part`, or because of `failure`, which it sends to the peers. Any
    // thread may still call `wake`.
    virtual void close(const std::optional<Error>& failure) noexcept = 0;
};

}  // namespace unisono
