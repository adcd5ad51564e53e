// A connected socket, plain or under TLS. Callers write and read clear text.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "memory/segment.h"
#include "transport/tls_session.h"

namespace unisono {

class Channel {
  public:
    // `tls`: the TLS session established over this socket, if any.
    Channel(Descriptor fd, std::unique_ptr<TlsSession> tls = nullptr)
        : fd_(std::move(fd)), tls_(std::move(tls)) {
        if (tls_) tls_->read_ahead();
    }

    [[nodiscard]] int fd() const noexcept { return fd_.get(); }
    // Work like sendmsg and readv. The caller must pass unwritten bytes again, because under TLS
    // they may already be encrypted; see `begun`.
    ssize_t write(iovec* parts, int count) noexcept {
        if (tls_) return tls_->write(parts, count);
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = static_cast<size_t>(count);
        return ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    ssize_t read(iovec* parts, int count) noexcept {
        if (!tls_) return ::readv(fd_.get(), parts, count);
        ssize_t total = 0;
        for (int i = 0; i < count; ++i) {
            const ssize_t got = tls_->read(parts[i].iov_base, parts[i].iov_len);
            if (got <= 0) return total > 0 ? total : got;
            total += got;
            if (static_cast<size_t>(got) < parts[i].iov_len || !tls_->pending()) break;
        }
        return total;
    }
    // Returns the number of bytes that `write` has not reported yet, but that can no longer be
    // withdrawn.
    [[nodiscard]] size_t begun() const noexcept { return tls_ ? tls_->begun() : 0; }
    // Returns true if there may be bytes to read that the socket does not report.
    [[nodiscard]] bool pending() const noexcept { return tls_ && tls_->pending(); }

    // Closes the descriptor in a forked child, where all other state belongs to the parent.
    void close() noexcept { fd_ = Descriptor(); }

  private:
    Descriptor fd_;
    std::unique_ptr<TlsSession> tls_;
};

}  // namespace unisono
