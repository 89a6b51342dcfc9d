// The functions of OpenSSL that TLS needs, found in a library that is loaded when it is first
// needed: neither the build nor an import depends on OpenSSL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

namespace diloco::link {

// An error of TLS or OpenSSL. The text is one plain sentence.
class TlsError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

namespace openssl {

// Opaque types, under OpenSSL's own names.
struct ASN1_INTEGER;
struct ASN1_TIME;
struct BIO;
struct BIO_METHOD;
struct EVP_MD;
struct EVP_PKEY;
struct OPENSSL_STACK;
struct OSSL_LIB_CTX;
struct SSL;
struct SSL_CIPHER;
struct SSL_CTX;
struct SSL_METHOD;
struct X509;
struct X509_STORE_CTX;

using AlpnChoice = int (*)(SSL*, const unsigned char** out, unsigned char* out_length,
                           const unsigned char* in, unsigned in_length, void*);

// Calls DO(result, name, parameters) for each OpenSSL function that is used, with the types of
// <openssl/ssl.h> of version 3.0.
#define DILOCO_OPENSSL_FUNCTIONS(DO)                                                               \
    DO(unsigned long, OpenSSL_version_num, ())                                                     \
    DO(int, OPENSSL_atexit, (void (*)()))                                                          \
    DO(int, OPENSSL_sk_num, (const OPENSSL_STACK*))                                                \
    DO(OSSL_LIB_CTX*, OSSL_LIB_CTX_new, ())                                                        \
    DO(void, OSSL_LIB_CTX_free, (OSSL_LIB_CTX*))                                                   \
    DO(void, ERR_clear_error, ())                                                                  \
    DO(unsigned long, ERR_get_error, ())                                                           \
    DO(const char*, ERR_reason_error_string, (unsigned long))                                      \
    DO(int, ASN1_INTEGER_set, (ASN1_INTEGER*, long))                                               \
    DO(int, ASN1_TIME_set_string_X509, (ASN1_TIME*, const char*))                                  \
    DO(int, BIO_get_new_index, ())                                                                 \
    DO(BIO_METHOD*, BIO_meth_new, (int, const char*))                                              \
    DO(int, BIO_meth_set_write, (BIO_METHOD*, int (*)(BIO*, const char*, int)))                    \
    DO(int, BIO_meth_set_read, (BIO_METHOD*, int (*)(BIO*, char*, int)))                           \
    DO(int, BIO_meth_set_ctrl, (BIO_METHOD*, long (*)(BIO*, int, long, void*)))                    \
    DO(BIO*, BIO_new, (const BIO_METHOD*))                                                         \
    DO(void, BIO_set_data, (BIO*, void*))                                                          \
    DO(void*, BIO_get_data, (BIO*))                                                                \
    DO(void, BIO_set_init, (BIO*, int))                                                            \
    DO(void, BIO_set_flags, (BIO*, int))                                                           \
    DO(void, BIO_clear_flags, (BIO*, int))                                                         \
    DO(EVP_PKEY*, EVP_PKEY_new_raw_private_key_ex,                                                 \
       (OSSL_LIB_CTX*, const char*, const char*, const unsigned char*, size_t))                    \
    DO(int, EVP_PKEY_get_raw_public_key, (const EVP_PKEY*, unsigned char*, size_t*))               \
    DO(int, EVP_PKEY_is_a, (const EVP_PKEY*, const char*))                                         \
    DO(void, EVP_PKEY_free, (EVP_PKEY*))                                                           \
    DO(X509*, X509_new_ex, (OSSL_LIB_CTX*, const char*))                                           \
    DO(int, X509_set_version, (X509*, long))                                                       \
    DO(ASN1_INTEGER*, X509_get_serialNumber, (X509*))                                              \
    DO(ASN1_TIME*, X509_getm_notBefore, (const X509*))                                             \
    DO(ASN1_TIME*, X509_getm_notAfter, (const X509*))                                              \
    DO(int, X509_set_pubkey, (X509*, EVP_PKEY*))                                                   \
    DO(int, X509_sign, (X509*, EVP_PKEY*, const EVP_MD*))                                          \
    DO(EVP_PKEY*, X509_get0_pubkey, (const X509*))                                                 \
    DO(void, X509_free, (X509*))                                                                   \
    DO(X509*, X509_STORE_CTX_get0_cert, (const X509_STORE_CTX*))                                   \
    DO(OPENSSL_STACK*, X509_STORE_CTX_get0_untrusted, (const X509_STORE_CTX*))                     \
    DO(void*, X509_STORE_CTX_get_ex_data, (const X509_STORE_CTX*, int))                            \
    DO(void, X509_STORE_CTX_set_error, (X509_STORE_CTX*, int))                                     \
    DO(const SSL_METHOD*, TLS_method, ())                                                          \
    DO(SSL_CTX*, SSL_CTX_new_ex, (OSSL_LIB_CTX*, const char*, const SSL_METHOD*))                  \
    DO(long, SSL_CTX_ctrl, (SSL_CTX*, int, long, void*))                                           \
    DO(uint64_t, SSL_CTX_set_options, (SSL_CTX*, uint64_t))                                        \
    DO(int, SSL_CTX_set_ciphersuites, (SSL_CTX*, const char*))                                     \
    DO(void, SSL_CTX_set_security_level, (SSL_CTX*, int))                                          \
    DO(int, SSL_CTX_set_num_tickets, (SSL_CTX*, size_t))                                           \
    DO(int, SSL_CTX_use_certificate, (SSL_CTX*, X509*))                                            \
    DO(int, SSL_CTX_use_PrivateKey, (SSL_CTX*, EVP_PKEY*))                                         \
    DO(void, SSL_CTX_set_verify, (SSL_CTX*, int, int (*)(int, X509_STORE_CTX*)))                   \
    DO(void, SSL_CTX_set_cert_verify_callback, (SSL_CTX*, int (*)(X509_STORE_CTX*, void*), void*)) \
    DO(int, SSL_CTX_set_alpn_protos, (SSL_CTX*, const unsigned char*, unsigned))                   \
    DO(void, SSL_CTX_set_alpn_select_cb, (SSL_CTX*, AlpnChoice, void*))                            \
    DO(void, SSL_CTX_set_default_read_buffer_len, (SSL_CTX*, size_t))                              \
    DO(void, SSL_CTX_free, (SSL_CTX*))                                                             \
    DO(SSL*, SSL_new, (SSL_CTX*))                                                                  \
    DO(int, SSL_set_ex_data, (SSL*, int, void*))                                                   \
    DO(void*, SSL_get_ex_data, (const SSL*, int))                                                  \
    DO(int, SSL_get_ex_data_X509_STORE_CTX_idx, ())                                                \
    DO(void, SSL_set_bio, (SSL*, BIO*, BIO*))                                                      \
    DO(void, SSL_set_connect_state, (SSL*))                                                        \
    DO(void, SSL_set_accept_state, (SSL*))                                                         \
    DO(int, SSL_do_handshake, (SSL*))                                                              \
    DO(int, SSL_read_ex, (SSL*, void*, size_t, size_t*))                                           \
    DO(int, SSL_peek_ex, (SSL*, void*, size_t, size_t*))                                           \
    DO(int, SSL_write_ex, (SSL*, const void*, size_t, size_t*))                                    \
    DO(int, SSL_has_pending, (const SSL*))                                                         \
    DO(int, SSL_get_error, (const SSL*, int))                                                      \
    DO(int, SSL_key_update, (SSL*, int))                                                           \
    DO(int, SSL_shutdown, (SSL*))                                                                  \
    DO(void, SSL_get0_alpn_selected, (const SSL*, const unsigned char**, unsigned*))               \
    DO(const SSL_CIPHER*, SSL_get_current_cipher, (const SSL*))                                    \
    DO(const char*, SSL_CIPHER_get_name, (const SSL_CIPHER*))                                      \
    DO(void, SSL_free, (SSL*))

struct Functions {
#define DILOCO_DECLARE(result, name, parameters) result(*name) parameters = nullptr;
    DILOCO_OPENSSL_FUNCTIONS(DILOCO_DECLARE)
#undef DILOCO_DECLARE
};

// Looks up all functions by `find`, which returns null for an unknown name. Throws TlsError if a
// function is missing or the version is older than 3.0; the error names `library`.
Functions find_functions(const std::string& library, const std::function<void*(const char*)>& find);

// The functions of this process's OpenSSL, which is loaded at the first call; throws TlsError. If
// Python brings a libssl of its own, `import ssl` must come first, so that this libssl is found.
const Functions& functions();

// OpenSSL's library context for all links of this process, separate from other users of OpenSSL:
// without their configuration file and providers. Null if OpenSSL cannot make one. The context is
// never freed: when a thread that has used it ends, OpenSSL looks into the context again, even if
// another thread had freed it.
OSSL_LIB_CTX* own_context();

// The number of forks between the first process and this one. Objects that OpenSSL has made before
// a fork must not be used after it.
uint64_t num_forks();

// Whether OpenSSL cleans up because the process ends: none of its functions may be called any more.
bool is_over();

// A thread holds a Use while it calls OpenSSL, and checks is_over() after it has made the Use. At
// the end of the process OpenSSL's clean-up waits until no Use is left, for at most a second.
class Use {
  public:
    Use();
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
};

// Why the last call of this thread failed, in a plain sentence; empties OpenSSL's queue of errors.
std::string take_trouble(const Functions& ssl);

}  // namespace openssl
}  // namespace diloco::link
