// TLS 1.3 over a connected socket. Both ends show certificates, or both have a key already.
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

// The files by which this rank shows who it is, and who may vouch for others.
struct TlsFiles {
    std::string certificate, key, authority;
};

// What connections have in common. Throws Error for files that are of no use, or without OpenSSL.
class TlsContext {
  public:
    // Without files each session brings a key of its own.
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

// One end of a connection. The socket is somebody else's, does not block, and outlives this. Ends
// without a word: what ranks say has ends of its own.
class TlsSession {
  public:
    static constexpr size_t kKeyBytes = 32;
    using Key = std::array<unsigned char, kKeyBytes>;

    // `key`: known to both ends only, and new; not used where certificates are.
    TlsSession(const TlsContext& context, int fd, bool dialing, const Key& key);
    TlsSession(const TlsSession&) = delete;
    TlsSession& operator=(const TlsSession&) = delete;
    ~TlsSession();

    // Goes on with the handshake; false: the other end has to say something first. Throws
    // Fault::stranger if it is not whom it should be.
    bool shake();
    // A number that the two ends of this very channel have in common, and no other channel has.
    [[nodiscard]] Key binding() const;

    // As recv and sendmsg do: bytes; 0 at the end; -1 and errno. EBADMSG: what came was not written
    // by the other end. What `write` could not finish it wants to be given again; `begun` tells how
    // many bytes of it are on their way.
    ssize_t read(void* data, size_t bytes) noexcept;
    ssize_t write(const iovec* parts, int count) noexcept;
    [[nodiscard]] size_t begun() const noexcept { return begun_; }
    // Bytes have been taken from the socket that nobody has read: it will not tell of them.
    [[nodiscard]] bool pending() const noexcept;
    // What is written from here on is under another key: no key is good for ever.
    bool renew_key() noexcept;
    // What was wrong with the last of these calls.
    [[nodiscard]] std::string problem() const;
    // From now on takes more from the socket than it needs at once: for those who ask `pending`.
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
    std::vector<char> outgoing_;  // records, of which the first `sent_` bytes have gone
    size_t sent_ = 0;
    size_t begun_ = 0;        // bytes of clear text in them
    uint64_t under_key_ = 0;  // bytes sealed since the key was new
    std::vector<char> incoming_;
    size_t begin_ = 0, end_ = 0;
    int error_ = 0;  // of the socket
    bool ended_ = false;
};

}  // namespace unisono
