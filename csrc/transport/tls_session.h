// TLS 1.3 over a connected socket. Both ends authenticate by certificates, or by a key that they
// share.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/openssl.h"

namespace unisono {

// Paths of this rank's certificate and key, and of the certificate of the authority that signs the
// peers' certificates.
struct TlsFiles {
    std::string certificate, key, authority;
};

// The settings that connections share. The constructor throws Error for unusable files, or if
// OpenSSL is missing.
class TlsContext {
  public:
    // `files`: nullptr if each session uses its own key.
    explicit TlsContext(const TlsFiles* files);

    [[nodiscard]] ssl_ctx_st* get() const noexcept { return context_.get(); }
    [[nodiscard]] bool by_certificate() const noexcept { return by_certificate_; }

  private:
    struct Free {
        void operator()(ssl_ctx_st* context) const noexcept { openssl().SSL_CTX_free(context); }
    };
    std::unique_ptr<ssl_ctx_st, Free> context_;
    bool by_certificate_;
};

// One end of a connection. The caller owns the socket, which does not block and outlives this
// object. The session sends no closing alert, because the protocols above TLS mark their own end.
class TlsSession {
  public:
    static constexpr size_t kKeyBytes = 32;
    using Key = std::array<unsigned char, kKeyBytes>;

    // `key`: a new key known only to both ends; unused with certificates.
    TlsSession(const TlsContext& context, int fd, bool dialing, const Key& key);
    TlsSession(const TlsSession&) = delete;
    TlsSession& operator=(const TlsSession&) = delete;
    ~TlsSession();

    // Continues the handshake. Returns false if the other end must send first. Throws
    // Fault::stranger if the other end is not authenticated.
    bool shake();
    // Returns a secret number that only the two ends of this connection know (channel binding).
    [[nodiscard]] Key binding() const;

    // Work like recv and sendmsg: return the number of bytes, 0 at the end, or -1 and set errno.
    // The errno EBADMSG means that the other end did not write the input. The caller must pass
    // unwritten bytes again; `begun` returns how many of them are already encrypted.
    ssize_t read(void* data, size_t bytes) noexcept;
    ssize_t write(const iovec* parts, int count) noexcept;
    [[nodiscard]] size_t begun() const noexcept { return begun_; }
    // Returns true if bytes were taken from the socket and not yet read. The socket does not report
    // them.
    [[nodiscard]] bool pending() const noexcept;
    // Switches to a new key for all later writes, because only a limited number of records may be
    // encrypted under one key.
    bool renew_key() noexcept;
    // Returns a description of the last call's error.
    [[nodiscard]] std::string problem() const;
    // Makes later reads take more bytes from the socket than needed. For callers that check
    // `pending`.
    void read_ahead() { incoming_.resize(kReadAhead); }

  private:
    static constexpr size_t kReadAhead = 128 << 10;

    static bio_st* records_of(TlsSession* session);
    static int take(bio_st* bio, char* data, int bytes);
    static int give(bio_st* bio, const char* data, int bytes);
    static int use_key(ssl_st* ssl, const evp_md_st* hash, const unsigned char** identity,
                       size_t* bytes, ssl_session_st** session);
    static int find_key(ssl_st* ssl, const unsigned char* identity, size_t bytes,
                        ssl_session_st** session);
    ssl_session_st* session_of_key() const;

    ssize_t receive(void* data, size_t bytes) noexcept;
    ssize_t from_socket(void* data, size_t bytes) noexcept;
    bool send_records() noexcept;
    bool seal(const iovec* parts, int count) noexcept;
    bool seal(const char* data, size_t bytes) noexcept;

    struct Free {
        void operator()(ssl_st* ssl) const noexcept { openssl().SSL_free(ssl); }
    };
    const int fd_;
    const bool by_certificate_, dialing_;
    Key key_;
    std::unique_ptr<ssl_st, Free> ssl_;
    std::vector<char> outgoing_;  // records; the first `sent_` bytes have been sent
    size_t sent_ = 0;
    size_t begun_ = 0;        // Bytes of clear text in the outgoing records.
    uint64_t under_key_ = 0;  // Bytes sealed under the current key.
    std::vector<char> incoming_;
    size_t begin_ = 0, end_ = 0;
    int error_ = 0;  // errno of the socket
    bool ended_ = false;
};

}  // namespace unisono
