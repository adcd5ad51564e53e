// One TCP connection to a peer: its outgoing and incoming frames.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "transport/silence.h"
#include "transport/socket_channel.h"
#include "transport/transport.h"

namespace unisono {

// An outgoing frame. Its payload stays in the caller's memory.
struct Outgoing {
    Frame frame;
    const std::byte* payload;
};

[[nodiscard]] inline bool has_callers_memory(const Outgoing& outgoing) noexcept {
    return is_callers(outgoing.frame.kind);
}

class Stream {
  public:
    explicit Stream(Channel channel);

    [[nodiscard]] int fd() const noexcept { return channel_.fd(); }
    [[nodiscard]] Silence& silence() noexcept { return silence_; }
    [[nodiscard]] uint64_t waiting_bytes() const noexcept { return waiting_bytes_; }
    [[nodiscard]] bool drained() const noexcept { return queue_.empty(); }
    // Returns true if a frame with callers' memory is still unsent.
    [[nodiscard]] bool reads_in_place() const noexcept {
        return std::any_of(queue_.begin(), queue_.end(), has_callers_memory);
    }
    // Returns the number of frames with callers' memory that were passed to the kernel completely.
    [[nodiscard]] uint64_t handed() const noexcept { return handed_; }

    // Appends a frame. Returns false after `abandon` or an error, when the stream accepts no more
    // frames.
    bool push(const Outgoing& outgoing);
    // Sends as much as the kernel accepts. Sends nothing after an error.
    void flush() noexcept;

    enum class Input : uint8_t { nothing, drained, more, ended };
    // Reads once and passes complete frames to `on_frame(frame)`. `place(frame)` returns the target
    // of a payload. The result `drained` means that the socket had fewer bytes than this call could
    // take.
    template <class Place, class OnFrame>
    Input receive(Place&& place, OnFrame&& on_frame);
    // Returns true if there may be bytes to receive that the descriptor does not report.
    [[nodiscard]] bool pending() const noexcept { return channel_.pending(); }
    // Returns the errno that ended the stream, or 0.
    [[nodiscard]] int error() const noexcept { return error_; }
    [[nodiscard]] std::string why_ended() const;
    // Returns true if the stream ended in the middle of a frame.
    [[nodiscard]] bool torn() const noexcept { return in_payload_ || begin_ < end_; }
    [[nodiscard]] bool broken() const noexcept { return broken_; }

    // Returns true if all sent bytes have reached the peer's host.
    [[nodiscard]] bool acknowledged() const noexcept;
    // Discards some of the input. Returns false if the input has ended.
    bool discard() noexcept;
    // Drops all unsent frames, except the rest of a frame that is partly sent. If that frame has
    // callers' memory, drops it too and ends the connection.
    void cut_short() noexcept;
    // Drops all unsent bytes and returns their number.
    uint64_t abandon() noexcept;

    // State of the transport: what epoll watches the stream for, and whether the stream has ended.
    bool watched = false, watched_for_room = false, watched_for_input = true;
    bool ended = false;
    // Closes only the descriptor: in a forked child all other state belongs to the parent.
    void close() noexcept { channel_.close(); }

  private:
    // Bytes of the buffer for heads, and for payloads that fit.
    static constexpr size_t kBuffer = 32 << 10;

    ssize_t read_into(iovec* parts, int count) noexcept;
    void sent(size_t bytes) noexcept;

    Channel channel_;
    Silence silence_;
    std::deque<Outgoing> queue_;
    size_t front_sent_ = 0;  // sent bytes of the first frame in the queue, with its head
    uint64_t waiting_bytes_ = 0;
    uint64_t handed_ = 0;
    int error_ = 0;
    bool broken_ = false;  // true: the stream cannot send any more

    std::vector<std::byte> buffer_;
    size_t begin_ = 0, end_ = 0;  // bytes read into the buffer and not yet used
    Frame frame_{};
    bool in_payload_ = false;
    std::byte* payload_ = nullptr;
    uint64_t left_ = 0;  // bytes of the payload not yet received
};

template <class Place, class OnFrame>
Stream::Input Stream::receive(Place&& place, OnFrame&& on_frame) {
    // Consumes complete frames from the buffer.
    const auto digest = [&] {
        for (;;) {
            if (!in_payload_) {
                if (end_ - begin_ < sizeof(Frame)) return;
                std::memcpy(&frame_, buffer_.data() + begin_, sizeof(Frame));
                begin_ += sizeof(Frame);
                in_payload_ = true;
                payload_ = nullptr;
                left_ = frame_.bytes;
            }
            if (left_ > 0) {
                if (!payload_) payload_ = place(frame_);
                const size_t bytes = std::min<uint64_t>(left_, end_ - begin_);
                std::memcpy(payload_, buffer_.data() + begin_, bytes);
                payload_ += bytes;
                left_ -= bytes;
                begin_ += bytes;
                if (left_ > 0) return;
            }
            in_payload_ = false;
            on_frame(frame_);
        }
    };
    if (begin_ > 0) {
        std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
        end_ -= begin_;
        begin_ = 0;
    }
    iovec parts[2];
    int count = 0;
    size_t direct = 0;
    if (in_payload_) parts[count++] = {payload_, direct = left_};
    const size_t room = kBuffer - end_;
    parts[count++] = {buffer_.data() + end_, room};
    const ssize_t got = read_into(parts, count);
    if (got == 0) return Input::nothing;
    if (got < 0) return Input::ended;
    const size_t placed = std::min<size_t>(static_cast<size_t>(got), direct);
    end_ += static_cast<size_t>(got) - placed;
    if (in_payload_) {
        payload_ += placed;
        left_ -= placed;
        if (left_ > 0) return pending() ? Input::more : Input::drained;
        in_payload_ = false;
        on_frame(frame_);
    }
    digest();
    return static_cast<size_t>(got) < direct + room && !pending() ? Input::drained : Input::more;
}

}  // namespace unisono
