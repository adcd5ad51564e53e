// The time for which the host at the other end of a connection has not acknowledged data.
//
// The kernel's TCP_USER_TIMEOUT is not suitable: it also counts a living peer that reads nothing as
// silent, because the peer's receive window is closed. Such a peer may be stopped, or may compute.
// So this class only asks the kernel when the last acknowledgement arrived.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>

namespace unisono {

class Silence {
  public:
    using Clock = std::chrono::steady_clock;
    static constexpr std::chrono::milliseconds kCheckEach{250};

    // Takes the timeout that was set on `fd`, and removes it from the kernel's socket.
    explicit Silence(int fd) noexcept : fd_(fd) {
        unsigned milliseconds = 0;
        socklen_t length = sizeof(milliseconds);
        if (::getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, &length) != 0) return;
        borne_ = std::chrono::milliseconds(milliseconds);
        milliseconds = 0;
        ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof(milliseconds));
    }

    [[nodiscard]] std::chrono::milliseconds borne() const noexcept { return borne_; }

    // Returns true if the silence has lasted too long. Must be called every `kCheckEach`. A call
    // after a longer pause measures the silence anew, because the unacknowledged bytes may have
    // been sent just now.
    [[nodiscard]] bool too_long(Clock::time_point now) noexcept {
        if (borne_.count() == 0) return false;
        tcp_info info{};
        socklen_t length = sizeof(info);
        const bool known = ::getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &length) == 0;
        const bool paused = now - checked_ > 4 * kCheckEach;
        checked_ = now;
        if (!known || info.tcpi_unacked == 0 || paused) {
            since_ = now;
        } else {
            since_ = std::max(since_, now - std::chrono::milliseconds(info.tcpi_last_ack_recv));
        }
        return now - since_ >= borne_;
    }

  private:
    int fd_;
    std::chrono::milliseconds borne_{0};
    Clock::time_point checked_{}, since_{};
};

}  // namespace unisono
