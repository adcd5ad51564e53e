#include "transport/openssl.h"

#include <dlfcn.h>

#include "core/error.h"

namespace unisono {
namespace {

constexpr const char* kLibrary = "libssl.so.3";
constexpr const char* kAdvice = "install OpenSSL 3 (on Debian and Ubuntu: apt install libssl3)";

}  // namespace

OpenSsl::OpenSsl(const std::string& library) {
    // The library is never closed, because functions that OpenSSL registered with the process may
    // run at the exit of the process.
    void* const handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char* const why = ::dlerror();
        throw Error(Fault::unsupported, "TLS needs " + library + ", which cannot be loaded here (" +
                                            (why ? why : "no reason given") + "): " + kAdvice);
    }
    const auto find = [&]<class Function>(Function& function, const char* name) {
        function = reinterpret_cast<Function>(
            ::dlsym(handle, name));  // also finds symbols of the library's dependencies
        if (!function)
            throw Error(Fault::unsupported, "TLS needs " + std::string(name) + ", which " +
                                                library +
                                                " of this host does not have: " + kAdvice);
    };
    find(TLS_method, "TLS_method");
    find(SSL_CTX_new, "SSL_CTX_new");
    find(SSL_CTX_free, "SSL_CTX_free");
    find(SSL_CTX_ctrl, "SSL_CTX_ctrl");
    find(SSL_CTX_set_ciphersuites, "SSL_CTX_set_ciphersuites");
    find(SSL_CTX_set_num_tickets, "SSL_CTX_set_num_tickets");
    find(SSL_CTX_set_verify, "SSL_CTX_set_verify");
    find(SSL_CTX_load_verify_locations, "SSL_CTX_load_verify_locations");
    find(SSL_CTX_use_certificate_chain_file, "SSL_CTX_use_certificate_chain_file");
    find(SSL_CTX_use_PrivateKey_file, "SSL_CTX_use_PrivateKey_file");
    find(SSL_CTX_check_private_key, "SSL_CTX_check_private_key");
    find(SSL_new, "SSL_new");
    find(SSL_free, "SSL_free");
    find(SSL_set_connect_state, "SSL_set_connect_state");
    find(SSL_set_accept_state, "SSL_set_accept_state");
    find(SSL_set_bio, "SSL_set_bio");
    find(SSL_set_verify, "SSL_set_verify");
    find(SSL_set_ex_data, "SSL_set_ex_data");
    find(SSL_get_ex_data, "SSL_get_ex_data");
    find(SSL_do_handshake, "SSL_do_handshake");
    find(SSL_read, "SSL_read");
    find(SSL_write, "SSL_write");
    find(SSL_has_pending, "SSL_has_pending");
    find(SSL_get_error, "SSL_get_error");
    find(SSL_get_verify_result, "SSL_get_verify_result");
    find(X509_verify_cert_error_string, "X509_verify_cert_error_string");
    find(SSL_key_update, "SSL_key_update");
    find(SSL_export_keying_material, "SSL_export_keying_material");
    find(SSL_set_psk_use_session_callback, "SSL_set_psk_use_session_callback");
    find(SSL_set_psk_find_session_callback, "SSL_set_psk_find_session_callback");
    find(SSL_CIPHER_find, "SSL_CIPHER_find");
    find(SSL_SESSION_new, "SSL_SESSION_new");
    find(SSL_SESSION_free, "SSL_SESSION_free");
    find(SSL_SESSION_set1_master_key, "SSL_SESSION_set1_master_key");
    find(SSL_SESSION_set_cipher, "SSL_SESSION_set_cipher");
    find(SSL_SESSION_set_protocol_version, "SSL_SESSION_set_protocol_version");
    find(SSL_session_reused, "SSL_session_reused");
    find(BIO_meth_new, "BIO_meth_new");
    find(BIO_meth_set_read, "BIO_meth_set_read");
    find(BIO_meth_set_write, "BIO_meth_set_write");
    find(BIO_meth_set_ctrl, "BIO_meth_set_ctrl");
    find(BIO_new, "BIO_new");
    find(BIO_set_data, "BIO_set_data");
    find(BIO_get_data, "BIO_get_data");
    find(BIO_set_init, "BIO_set_init");
    find(BIO_set_flags, "BIO_set_flags");
    find(BIO_clear_flags, "BIO_clear_flags");
    find(ERR_clear_error, "ERR_clear_error");
    find(ERR_peek_error, "ERR_peek_error");
    find(ERR_reason_error_string, "ERR_reason_error_string");
}

const OpenSsl& openssl() {
    static const OpenSsl loaded(kLibrary);
    return loaded;
}

}  // namespace unisono
