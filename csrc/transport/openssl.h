// Bindings to the host's OpenSSL 3, loaded when TLS is requested. A build, or a run without TLS,
// does not need OpenSSL. Declares only the functions that the TLS sources call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

// OpenSSL's own types, opaque, under their original names.
struct ssl_st;
struct ssl_ctx_st;
struct ssl_method_st;
struct ssl_session_st;
struct ssl_cipher_st;
struct bio_st;
struct bio_method_st;
struct evp_md_st;

namespace unisono {

using PskUse = int (*)(ssl_st*, const evp_md_st*, const unsigned char**, size_t*, ssl_session_st**);
using PskFind = int (*)(ssl_st*, const unsigned char*, size_t, ssl_session_st**);

struct OpenSsl {
    // Throws Error if the library is missing or lacks a function.
    explicit OpenSsl(const std::string& library);

    // Contexts.
    const ssl_method_st* (*TLS_method)();
    ssl_ctx_st* (*SSL_CTX_new)(const ssl_method_st*);
    void (*SSL_CTX_free)(ssl_ctx_st*);
    long (*SSL_CTX_ctrl)(ssl_ctx_st*, int, long, void*);
    int (*SSL_CTX_set_ciphersuites)(ssl_ctx_st*, const char*);
    int (*SSL_CTX_set_num_tickets)(ssl_ctx_st*, size_t);
    void (*SSL_CTX_set_verify)(ssl_ctx_st*, int, void*);
    int (*SSL_CTX_load_verify_locations)(ssl_ctx_st*, const char*, const char*);
    int (*SSL_CTX_use_certificate_chain_file)(ssl_ctx_st*, const char*);
    int (*SSL_CTX_use_PrivateKey_file)(ssl_ctx_st*, const char*, int);
    int (*SSL_CTX_check_private_key)(const ssl_ctx_st*);

    // Connections.
    ssl_st* (*SSL_new)(ssl_ctx_st*);
    void (*SSL_free)(ssl_st*);
    void (*SSL_set_connect_state)(ssl_st*);
    void (*SSL_set_accept_state)(ssl_st*);
    void (*SSL_set_bio)(ssl_st*, bio_st*, bio_st*);
    void (*SSL_set_verify)(ssl_st*, int, void*);
    int (*SSL_set_ex_data)(ssl_st*, int, void*);
    void* (*SSL_get_ex_data)(const ssl_st*, int);
    int (*SSL_do_handshake)(ssl_st*);
    int (*SSL_read)(ssl_st*, void*, int);
    int (*SSL_write)(ssl_st*, const void*, int);
    int (*SSL_has_pending)(const ssl_st*);
    int (*SSL_get_error)(const ssl_st*, int);
    long (*SSL_get_verify_result)(const ssl_st*);
    const char* (*X509_verify_cert_error_string)(long);
    int (*SSL_key_update)(ssl_st*, int);
    int (*SSL_export_keying_material)(ssl_st*, unsigned char*, size_t, const char*, size_t,
                                      const unsigned char*, size_t, int);

    // Pre-shared keys.
    void (*SSL_set_psk_use_session_callback)(ssl_st*, PskUse);
    void (*SSL_set_psk_find_session_callback)(ssl_st*, PskFind);
    const ssl_cipher_st* (*SSL_CIPHER_find)(ssl_st*, const unsigned char*);
    ssl_session_st* (*SSL_SESSION_new)();
    void (*SSL_SESSION_free)(ssl_session_st*);
    int (*SSL_SESSION_set1_master_key)(ssl_session_st*, const unsigned char*, size_t);
    int (*SSL_SESSION_set_cipher)(ssl_session_st*, const ssl_cipher_st*);
    int (*SSL_SESSION_set_protocol_version)(ssl_session_st*, int);
    int (*SSL_session_reused)(const ssl_st*);

    // The functions that read and write a connection's records.
    bio_method_st* (*BIO_meth_new)(int, const char*);
    int (*BIO_meth_set_read)(bio_method_st*, int (*)(bio_st*, char*, int));
    int (*BIO_meth_set_write)(bio_method_st*, int (*)(bio_st*, const char*, int));
    int (*BIO_meth_set_ctrl)(bio_method_st*, long (*)(bio_st*, int, long, void*));
    bio_st* (*BIO_new)(const bio_method_st*);
    void (*BIO_set_data)(bio_st*, void*);
    void* (*BIO_get_data)(bio_st*);
    void (*BIO_set_init)(bio_st*, int);
    void (*BIO_set_flags)(bio_st*, int);
    void (*BIO_clear_flags)(bio_st*, int);

    // Errors of the calling thread.
    void (*ERR_clear_error)();
    unsigned long (*ERR_peek_error)();
    const char* (*ERR_reason_error_string)(unsigned long);
};

// Returns the library that this process uses. Throws Error as the constructor does.
const OpenSsl& openssl();

}  // namespace unisono
