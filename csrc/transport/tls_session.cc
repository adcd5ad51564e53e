#include "transport/tls_session.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "kernels/kernels.h"

namespace unisono {
namespace {

// Constants from OpenSSL's headers that are part of its binary interface.
constexpr int kCtrlMode = 33, kCtrlSessionCache = 44, kCtrlLowest = 123, kCtrlFlush = 11;
constexpr long kPartialWrites = 1, kMovingBuffer = 2;
constexpr long kTls13 = 0x0304;
constexpr int kVerifyPeer = 1, kVerifyMust = 2;
constexpr int kPem = 1;
constexpr int kRetryRead = 0x01 | 0x08, kAnyRetry = 0x0f;
constexpr int kWantRead = 2;
constexpr int kSourceSink = 0x0400;
constexpr int kKeyUpdateOfOurs = 0;

// Both suites hash with SHA-256, as the keys of the sessions require. The second suite is for
// processors without AES instructions.
constexpr const char* kSuites = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
constexpr unsigned char kSuiteOfKey[] = {0x13, 0x01};
constexpr std::string_view kIdentity = "unisono";
constexpr std::string_view kBinding = "EXPORTER-unisono-channel";

constexpr size_t kRecord = 16 << 10;  // The largest record of TLS.
// Bytes that are sealed together, and sent by one system call.
constexpr size_t kBatch = 8 * kRecord;
constexpr size_t kMostRead = 1 << 30;
// AES-GCM allows 2^24.5 records under one key (RFC 8446, 5.5). The limit is counted in bytes here,
// with at least kLeastRecord bytes for each record.
constexpr uint64_t kUnderOneKey = 64ULL << 30;
constexpr size_t kLeastRecord = 4 << 10;  // a shorter record counts as this many bytes

std::string reason() {
    const unsigned long code = openssl().ERR_peek_error();
    const char* const text = code ? openssl().ERR_reason_error_string(code) : nullptr;
    return text ? text : "no reason given";
}

void require(bool true_, const std::string& what) {
    if (!true_) throw Error(Fault::invalid, what + ": " + reason());
}

}  // namespace

TlsContext::TlsContext(const TlsFiles* files) : by_certificate_(files != nullptr) {
    const OpenSsl& o = openssl();
    o.ERR_clear_error();
    context_.reset(o.SSL_CTX_new(o.TLS_method()));
    require(context_ != nullptr, "creating a TLS context");
    ssl_ctx_st* const c = context_.get();
    require(o.SSL_CTX_ctrl(c, kCtrlLowest, kTls13, nullptr) == 1 &&
                o.SSL_CTX_set_ciphersuites(c, kSuites) == 1 && o.SSL_CTX_set_num_tickets(c, 0) == 1,
            "setting up TLS 1.3 with AES-GCM or ChaCha20");
    o.SSL_CTX_ctrl(c, kCtrlMode, kPartialWrites | kMovingBuffer, nullptr);
    o.SSL_CTX_ctrl(c, kCtrlSessionCache, 0, nullptr);
    if (!files) return;
    o.SSL_CTX_set_verify(c, kVerifyPeer | kVerifyMust, nullptr);
    require(o.SSL_CTX_use_certificate_chain_file(c, files->certificate.c_str()) == 1,
            "UNISONO_TLS_CERTIFICATE: no certificate in " + files->certificate);
    require(o.SSL_CTX_use_PrivateKey_file(c, files->key.c_str(), kPem) == 1,
            "UNISONO_TLS_KEY: no key for the certificate in " + files->key);
    require(o.SSL_CTX_check_private_key(c) == 1,
            "UNISONO_TLS_KEY: " + files->key + " is not the key of " + files->certificate);
    require(o.SSL_CTX_load_verify_locations(c, files->authority.c_str(), nullptr) == 1,
            "UNISONO_TLS_CA: no certificates in " + files->authority);
}

TlsSession::TlsSession(const TlsContext& context, int fd, bool dialing, const Key& key)
    : fd_(fd),
      by_certificate_(context.by_certificate()),
      dialing_(dialing),
      key_(key),
      ssl_(openssl().SSL_new(context.get())) {
    const OpenSsl& o = openssl();
    bio_st* const records = ssl_ ? records_of(this) : nullptr;
    if (!records) throw Error(Fault::system, "no memory for a TLS connection");
    o.SSL_set_bio(ssl_.get(), records, records);
    o.SSL_set_ex_data(ssl_.get(), 0, this);
    if (!by_certificate_) {
        // The end that dials rejects an end that shows a certificate instead of using the shared
        // key. Without an authority, a certificate proves nothing.
        if (dialing) o.SSL_set_verify(ssl_.get(), kVerifyPeer, nullptr);
        dialing ? o.SSL_set_psk_use_session_callback(ssl_.get(), use_key)
                : o.SSL_set_psk_find_session_callback(ssl_.get(), find_key);
    }
    dialing ? o.SSL_set_connect_state(ssl_.get()) : o.SSL_set_accept_state(ssl_.get());
}

TlsSession::~TlsSession() = default;

// ---- records to and from the socket

bio_st* TlsSession::records_of(TlsSession* session) {
    static bio_method_st* const method = [] {
        const OpenSsl& o = openssl();
        bio_method_st* const made = o.BIO_meth_new(kSourceSink, "unisono records");
        o.BIO_meth_set_read(made, take);
        o.BIO_meth_set_write(made, give);
        o.BIO_meth_set_ctrl(
            made, [](bio_st*, int what, long, void*) { return what == kCtrlFlush ? 1L : 0L; });
        return made;
    }();
    bio_st* const bio = openssl().BIO_new(method);
    if (!bio) return nullptr;
    openssl().BIO_set_data(bio, session);
    openssl().BIO_set_init(bio, 1);
    return bio;
}

int TlsSession::give(bio_st* bio, const char* data, int bytes) {
    auto& self = *static_cast<TlsSession*>(openssl().BIO_get_data(bio));
    try {
        self.outgoing_.insert(self.outgoing_.end(), data, data + bytes);
    } catch (const std::bad_alloc&) {
        self.error_ = ENOMEM;
        return -1;
    }
    return bytes;
}

int TlsSession::take(bio_st* bio, char* data, int bytes) {
    auto& self = *static_cast<TlsSession*>(openssl().BIO_get_data(bio));
    openssl().BIO_clear_flags(bio, kAnyRetry);
    const ssize_t got = self.receive(data, static_cast<size_t>(bytes));
    if (got < 0 && errno == EAGAIN) openssl().BIO_set_flags(bio, kRetryRead);
    return static_cast<int>(got);
}

ssize_t TlsSession::receive(void* data, size_t bytes) noexcept {
    if (incoming_.empty()) return from_socket(data, bytes);
    if (begin_ == end_) {
        const ssize_t got = from_socket(incoming_.data(), incoming_.size());
        if (got <= 0) return got;
        begin_ = 0;
        end_ = static_cast<size_t>(got);
    }
    const size_t some = std::min(bytes, end_ - begin_);
    kernels::copy(data, incoming_.data() + begin_, some);
    begin_ += some;
    return static_cast<ssize_t>(some);
}

ssize_t TlsSession::from_socket(void* data, size_t bytes) noexcept {
    for (;;) {
        const ssize_t got = ::recv(fd_, data, bytes, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got == 0) ended_ = true;
        if (got < 0 && errno != EAGAIN) error_ = errno;
        return got;
    }
}

// Sends the sealed records. Returns true if all were sent; otherwise sets errno.
bool TlsSession::send_records() noexcept {
    while (sent_ < outgoing_.size()) {
        const ssize_t gone = ::send(fd_, outgoing_.data() + sent_, outgoing_.size() - sent_,
                                    MSG_NOSIGNAL | MSG_DONTWAIT);
        if (gone < 0 && errno == EINTR) continue;
        if (gone < 0) return false;
        sent_ += static_cast<size_t>(gone);
    }
    outgoing_.clear();
    sent_ = 0;
    return true;
}

// ---- handshake

bool TlsSession::shake() {
    const OpenSsl& o = openssl();
    o.ERR_clear_error();
    const int done = o.SSL_do_handshake(ssl_.get());
    if (done != 1 && (ended_ || error_ || o.SSL_get_error(ssl_.get(), done) != kWantRead)) {
        const std::string why = problem();
        static_cast<void>(send_records());  // the alert tells the other end the reason
        throw Error(Fault::stranger, why);
    }
    const bool sent = send_records();
    if (done != 1) {
        if (!sent) throw Error(Fault::stranger, "accepts no bytes in the TLS handshake");
        return false;
    }
    ::explicit_bzero(key_.data(), key_.size());
    // Without this check, the other end could show a certificate instead of using the shared key. A
    // certificate proves nothing here.
    if (!by_certificate_ && o.SSL_session_reused(ssl_.get()) != 1)
        throw Error(Fault::stranger, "the other end did not use the key of this session for TLS");
    return true;
}

std::string TlsSession::problem() const {
    if (ended_) return "closed the connection in the middle of the TLS handshake";
    if (error_) return "TLS handshake: " + std::generic_category().message(error_);
    const long verdict = by_certificate_ ? openssl().SSL_get_verify_result(ssl_.get()) : 0;
    if (verdict == 0) return "TLS: " + reason();
    return std::string("TLS: the other end's certificate is refused: ") +
           openssl().X509_verify_cert_error_string(verdict);
}

TlsSession::Key TlsSession::binding() const {
    Key number{};
    if (openssl().SSL_export_keying_material(ssl_.get(), number.data(), number.size(),
                                             kBinding.data(), kBinding.size(), nullptr, 0, 0) != 1)
        throw Error(Fault::stranger, "TLS: no channel binding: " + reason());
    return number;
}

// ---- pre-shared key

ssl_session_st* TlsSession::session_of_key() const {
    const OpenSsl& o = openssl();
    ssl_session_st* const session = o.SSL_SESSION_new();
    if (!session) return nullptr;
    if (o.SSL_SESSION_set1_master_key(session, key_.data(), key_.size()) == 1 &&
        o.SSL_SESSION_set_cipher(session, o.SSL_CIPHER_find(ssl_.get(), kSuiteOfKey)) == 1 &&
        o.SSL_SESSION_set_protocol_version(session, kTls13) == 1)
        return session;
    o.SSL_SESSION_free(session);
    return nullptr;
}

int TlsSession::use_key(ssl_st* ssl, const evp_md_st*, const unsigned char** identity,
                        size_t* bytes, ssl_session_st** session) {
    const auto& self = *static_cast<const TlsSession*>(openssl().SSL_get_ex_data(ssl, 0));
    *identity = reinterpret_cast<const unsigned char*>(kIdentity.data());
    *bytes = kIdentity.size();
    *session = self.session_of_key();
    return *session ? 1 : 0;
}

int TlsSession::find_key(ssl_st* ssl, const unsigned char*, size_t, ssl_session_st** session) {
    const auto& self = *static_cast<const TlsSession*>(openssl().SSL_get_ex_data(ssl, 0));
    *session = self.session_of_key();  // this session has only one key, so any identity names it
    return *session ? 1 : 0;
}

// ---- clear text

ssize_t TlsSession::read(void* data, size_t bytes) noexcept {
    const OpenSsl& o = openssl();
    o.ERR_clear_error();
    size_t total = 0;
    do {
        const int most = static_cast<int>(std::min(bytes - total, kMostRead));
        const int got = o.SSL_read(ssl_.get(), static_cast<char*>(data) + total, most);
        if (got <= 0) {
            if (total > 0) break;  // the next call reports the error again
            if (ended_) return 0;
            errno = error_                                          ? error_
                    : o.SSL_get_error(ssl_.get(), got) == kWantRead ? EAGAIN
                                                                    : EBADMSG;
            return -1;
        }
        total += static_cast<size_t>(got);
    } while (total < bytes && pending());
    return static_cast<ssize_t>(total);
}

bool TlsSession::pending() const noexcept {
    return begin_ < end_ || openssl().SSL_has_pending(ssl_.get()) == 1;
}

ssize_t TlsSession::write(const iovec* parts, int count) noexcept {
    if (begun_ == 0 && !seal(parts, count)) {
        errno = error_ ? error_ : EPROTO;
        return -1;
    }
    if (!send_records()) return -1;
    return static_cast<ssize_t>(std::exchange(begun_, 0));
}

// Encrypts the parts into records. Small parts are copied together into one record. A part that
// fills a record is encrypted without a copy.
bool TlsSession::seal(const iovec* parts, int count) noexcept {
    std::array<char, kRecord> together;
    size_t at = 0;  // offset in the first part
    while (count > 0 && begun_ < kBatch) {
        const char* data = static_cast<const char*>(parts->iov_base) + at;
        size_t bytes = std::min(parts->iov_len - at, kRecord);
        if (bytes == kRecord || count == 1) {
            at += bytes;
        } else {
            data = together.data();
            for (bytes = 0; count > 0 && bytes < kRecord;) {
                const size_t some = std::min(parts->iov_len - at, kRecord - bytes);
                std::memcpy(together.data() + bytes, static_cast<char*>(parts->iov_base) + at,
                            some);
                bytes += some;
                at += some;
                if (at < parts->iov_len) break;
                at = 0, ++parts, --count;
            }
        }
        if (count > 0 && at == parts->iov_len) at = 0, ++parts, --count;
        if (!seal(data, bytes)) return false;
        begun_ += bytes;
    }
    return true;
}

bool TlsSession::renew_key() noexcept {
    under_key_ = 0;
    return openssl().SSL_key_update(ssl_.get(), kKeyUpdateOfOurs) == 1;
}

bool TlsSession::seal(const char* data, size_t bytes) noexcept {
    const OpenSsl& o = openssl();
    o.ERR_clear_error();
    under_key_ += std::max(bytes, kLeastRecord);
    if (under_key_ > kUnderOneKey && !renew_key()) return false;
    return o.SSL_write(ssl_.get(), data, static_cast<int>(bytes)) == static_cast<int>(bytes);
}

}  // namespace unisono
