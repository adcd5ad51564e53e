// The transport over TCP: one or more streams to each peer. Waiting threads make its progress.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/tcp_stream.h"
#include "transport/transport.h"

namespace unisono {

class TcpTransport final : public Transport {
  public:
    TcpTransport(uint32_t ranks, Receiver& receiver);
    TcpTransport(const TcpTransport&) = delete;
    TcpTransport& operator=(const TcpTransport&) = delete;
    ~TcpTransport() override = default;

    // Adds a connection to a peer that has proved its identity. Any thread may call this. Frames
    // wait until all `streams` of the peer are connected. A connection that is not needed is
    // closed.
    void attach(uint32_t peer, uint32_t stream, uint32_t streams, Channel channel);
    // Tells a peer that this rank has left the group, and closes the connection.
    static void say_left_to(Channel channel);
    // Closes a forked child's copies of all connections, without effect on the parent's
    // connections.
    void abandon() noexcept;

    void send(uint32_t peer, const Frame& frame, std::span<const Load> loads) override;
    [[nodiscard]] uint64_t handed(uint32_t peer) const noexcept override;
    bool poll() override;
    Woken sleep(double seconds, const std::function<bool()>& awake) override;
    void wake() noexcept override;
    [[nodiscard]] bool forget_messages(const Error& failure) noexcept override;
    bool forget_messages(uint32_t peer) noexcept override;
    [[nodiscard]] bool idle() const noexcept override;
    [[nodiscard]] bool reached(uint32_t peer) const noexcept override;
    [[nodiscard]] bool part() noexcept override;
    [[nodiscard]] bool parted() noexcept override;
    void close(const std::optional<Error>& failure) noexcept override;

  private:
    // A post that has not arrived completely, or that arrived before an earlier post.
    struct Partial {
        Frame frame{};
        bool announced = false;
        uint32_t loads = 0;
    };
    struct Peer {
        std::vector<std::unique_ptr<Stream>> streams;
        size_t open = 0;             // Number of streams that have not ended.
        bool connected = false;      // True: all streams are connected.
        std::deque<Outgoing> early;  // Frames queued until all streams are connected.
        uint64_t sent = 0;           // Number of posts sent.
        uint64_t delivered = 0;      // Number of posts delivered.
        bool left = false;           // True: the peer has announced that it leaves.
        std::deque<Partial> partial;
    };
    struct Arrival {
        uint32_t peer, stream, streams;
        Channel channel;
    };

    void admit();
    bool take(Arrival& arrival);
    void push(Peer& to, const Outgoing& outgoing);
    void flush(uint32_t peer);
    void flush(uint32_t peer, size_t index);
    bool read(uint32_t peer, size_t index);
    void arrived(uint32_t peer, const Frame& frame);
    void note(uint32_t peer, const Frame& frame);
    void deliver_whole(uint32_t peer);
    void end(uint32_t peer, size_t index);
    void watch(uint32_t peer, size_t index);
    void check_silence();
    [[nodiscard]] bool is_time_to_check_silence(Silence::Clock::time_point now) noexcept;
    [[nodiscard]] bool reads_in_place() const noexcept;
    void say_left();
    void say_failed(const Error& failure);
    void stop_attaching() noexcept;
    [[nodiscard]] static bool arrived(Stream& stream) noexcept;

    Receiver& receiver_;
    Descriptor epoll_, doorbell_;
    std::vector<Peer> peers_;
    std::atomic<uint64_t> unsent_bytes_{0};         // Unsent bytes of all streams and early queues.
    Silence::Clock::time_point silence_checked_{};  // Last check for silence.
    // Streams that have more input than their sockets report, because it was already read from
    // them.
    std::vector<std::pair<uint32_t, size_t>> buffered_;
    std::atomic<uint32_t> asleep_{0};  // Number of threads that sleep or are about to sleep.
    std::mutex mutex_;                 // Guards the arrivals and the list of streams.
    std::vector<Arrival> arrivals_;
    bool closed_ = false;
    std::atomic<bool> any_arrivals_{false};
};

}  // namespace unisono
