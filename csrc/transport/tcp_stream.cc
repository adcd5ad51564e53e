#include "transport/tcp_stream.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <new>
#include <system_error>
#include <utility>

namespace unisono {
namespace {

constexpr int kMostParts = 32;     // Maximum number of heads and payloads in one system call.
constexpr int kMostDiscards = 64;  // Maximum number of reads in one discard().

}  // namespace

Stream::Stream(Channel channel)
    : channel_(std::move(channel)), silence_(channel_.fd()), buffer_(kBuffer) {}

bool Stream::push(const Outgoing& outgoing) {
    if (broken_) return false;
    queue_.push_back(outgoing);
    waiting_bytes_ += sizeof(Frame) + outgoing.frame.bytes;
    return true;
}

void Stream::flush() noexcept {
    while (!queue_.empty() && !broken_) {
        std::array<iovec, kMostParts> parts;
        int count = 0;
        size_t skip = front_sent_;
        const auto add = [&](const void* data, size_t bytes) {
            if (skip >= bytes) {
                skip -= bytes;
                return;
            }
            parts[static_cast<size_t>(count++)] = {
                const_cast<std::byte*>(static_cast<const std::byte*>(data)) + skip, bytes - skip};
            skip = 0;
        };
        for (auto it = queue_.begin(); it != queue_.end() && count + 2 <= kMostParts; ++it) {
            add(&it->frame, sizeof(Frame));
            add(it->payload, it->frame.bytes);
        }
        const ssize_t bytes = channel_.write(parts.data(), count);
        if (bytes < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN || errno == ENOBUFS) return;
            error_ = errno;
            abandon();  // bytes already received remain readable and may explain the error
            return;
        }
        sent(static_cast<size_t>(bytes));
    }
}

void Stream::sent(size_t bytes) noexcept {
    waiting_bytes_ -= bytes;
    front_sent_ += bytes;
    while (!queue_.empty()) {
        const Frame& frame = queue_.front().frame;
        const size_t whole = sizeof(Frame) + frame.bytes;
        if (front_sent_ < whole) return;
        front_sent_ -= whole;
        if (is_callers(frame.kind)) ++handed_;
        queue_.pop_front();
    }
}

// Returns the number of bytes read, 0 if there are none, or -1 at the end of the stream.
ssize_t Stream::read_into(iovec* parts, int count) noexcept {
    for (;;) {
        const ssize_t got = channel_.read(parts, count);
        if (got > 0) return got;
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == EAGAIN) return 0;
        if (got < 0) error_ = errno;
        return -1;
    }
}

std::string Stream::why_ended() const {
    if (error_ == 0) return "its connection ended";
    if (error_ == EBADMSG) return "the received data was changed in transit (TLS)";
    return std::generic_category().message(error_);
}

bool Stream::acknowledged() const noexcept {
    int bytes = 0;
    return ::ioctl(fd(), SIOCOUTQ, &bytes) != 0 || bytes == 0;
}

void Stream::cut_short() noexcept {
    const uint64_t begun = front_sent_ + channel_.begun();
    uint64_t whole = 0;
    size_t frames = 0;
    for (; whole < begun && frames < queue_.size(); ++frames)
        whole += sizeof(Frame) + queue_[frames].frame.bytes;
    while (queue_.size() > frames) queue_.pop_back();
    waiting_bytes_ = queue_.empty() ? 0 : whole - front_sent_;
    if (queue_.empty() || whole == begun) return;
    if (is_callers(queue_.back().frame.kind)) abandon();
}

uint64_t Stream::abandon() noexcept {
    broken_ = true;
    queue_.clear();
    front_sent_ = 0;
    return std::exchange(waiting_bytes_, 0);
}

bool Stream::discard() noexcept {
    for (int i = 0; i < kMostDiscards; ++i) {
        const ssize_t got = ::recv(fd(), buffer_.data(), buffer_.size(), MSG_DONTWAIT);
        if (got > 0 || (got < 0 && errno == EINTR)) continue;
        return got < 0 && errno == EAGAIN;
    }
    return true;
}

}  // namespace unisono
