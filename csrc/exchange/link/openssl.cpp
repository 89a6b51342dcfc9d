#include "exchange/link/openssl.h"

#include <dlfcn.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>

namespace diloco::link::openssl {
namespace {

constexpr unsigned long kOldestVersion = 0x30000000UL;
constexpr const char* kLibrary = "libssl.so.3";

std::atomic<uint64_t> forks{0};
std::atomic<bool> cleans_up{false};
std::atomic<int> num_uses{0};

// OpenSSL calls this function at the end of the process, before it frees anything. The wait is
// bounded: a signal handler may end the process on a thread that holds a Use itself.
void wait_for_uses() {
    cleans_up.store(true);
    for (int i = 0; i < 1000 && num_uses.load() != 0; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

// Resets the count in a forked child, where the parent's threads that held a Use do not exist.
void enter_child() {
    forks.fetch_add(1);
    num_uses.store(0);
}

std::string text_of_version(unsigned long number) {
    return std::to_string(number >> 28) + "." + std::to_string((number >> 20) & 0xff);
}

Functions load() {
    const auto find_in = [](void* library) {
        return [library](const char* name) { return dlsym(library, name); };
    };
    // OpenSSL may be linked into the Python program itself. If some functions are missing there, or
    // belong to another library, the shared library is used.
    void* const program = dlopen(nullptr, RTLD_NOW);
    if (program != nullptr && dlsym(program, "SSL_new") != nullptr) {
        try {
            return find_functions("the OpenSSL of this program", find_in(program));
        } catch (const TlsError&) {
        }
    }
    void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (library == nullptr) library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const char* const reason = dlerror();
        throw TlsError(std::string("an encrypted link needs OpenSSL 3.0 or newer, and ") +
                       kLibrary + " cannot be loaded: " + (reason ? reason : "no reason given"));
    }
    return find_functions(kLibrary, find_in(library));
}

struct Loaded {
    Functions functions = load();

    Loaded() {
        pthread_atfork(nullptr, nullptr, enter_child);
        functions.OPENSSL_atexit(wait_for_uses);
    }
};

// Error numbers of <openssl/sslerr.h> in plain words. Numbers from 1000 on are 1000 plus the number
// of the TLS alert with which the peer has ended the connection.
struct Reason {
    unsigned long number;
    const char* sentence;
};
constexpr std::array<Reason, 21> kReasons{{
    {101, "the peer offers no key exchange that is known here"},
    {115, "the peer does not speak TLS"},
    {123, "the peer does not hold the private key of its certificate"},
    {134, "the certificate of the peer was refused"},
    {152, "the peer sent a larger certificate than a link has"},
    {155, "the peer does not speak TLS, but HTTP"},
    {156, "the peer does not speak TLS, but HTTP"},
    {193, "the peer offers no cipher that is known here"},
    {198, "the peer does not speak TLS, or bytes of the connection were changed"},
    {199, "the peer showed no certificate"},
    {207, "this side has said goodbye already"},
    {235, "the peer speaks TLS, but no link"},
    {258, "the peer does not speak TLS 1.3"},
    {267, "the peer does not speak TLS"},
    {281, "bytes of the connection were changed on the way"},
    {1020, "the peer says that bytes of the connection were changed on the way"},
    {1042, "the peer does not allow this process's key"},
    {1048, "the peer does not know this process's key"},
    {1070, "the peer does not speak TLS 1.3"},
    {1116, "the peer asks for a certificate"},
    {1120, "the peer speaks TLS, but no link"},
}};

// The fields of an OpenSSL 3 error code.
constexpr unsigned long kLibraryOfSsl = 20;
constexpr unsigned long library_of(unsigned long error) { return (error >> 23) & 0xff; }
constexpr unsigned long reason_of(unsigned long error) { return error & 0x7fffff; }

}  // namespace

Functions find_functions(const std::string& library,
                         const std::function<void*(const char*)>& find) {
    Functions found;
    const auto find_one = [&](const char* name) {
        void* const function = find(name);
        if (function == nullptr) {
            throw TlsError("an encrypted link needs OpenSSL 3.0 or newer, and " + library +
                           " has no function " + name);
        }
        return function;
    };
    // Check the version first: an error about an old version says more than one about a missing
    // function.
    found.OpenSSL_version_num =
        reinterpret_cast<unsigned long (*)()>(find_one("OpenSSL_version_num"));
    const unsigned long version = found.OpenSSL_version_num();
    if (version < kOldestVersion) {
        throw TlsError("an encrypted link needs OpenSSL 3.0 or newer, and " + library +
                       " is of version " + text_of_version(version));
    }
#define DILOCO_FIND(result, name, parameters) \
    found.name = reinterpret_cast<result(*) parameters>(find_one(#name));
    DILOCO_OPENSSL_FUNCTIONS(DILOCO_FIND)
#undef DILOCO_FIND
    return found;
}

const Functions& functions() {
    static const Loaded loaded;
    return loaded.functions;
}

namespace {

struct OwnContext {
    uint64_t num_forks;
    OSSL_LIB_CTX* context;
};

}  // namespace

OSSL_LIB_CTX* own_context() {
    // An atomic pointer and no mutex, which another thread could hold while this process forks. A
    // child makes its own context, because locks in the parent's may stay held for ever.
    static std::atomic<OwnContext*> own{nullptr};
    OwnContext* known = own.load(std::memory_order_acquire);
    if (known != nullptr && known->num_forks == num_forks()) return known->context;
    const Functions& ssl = functions();
    OSSL_LIB_CTX* const made = ssl.OSSL_LIB_CTX_new();
    if (made == nullptr) return nullptr;
    auto* const mine = new OwnContext{num_forks(), made};
    if (own.compare_exchange_strong(known, mine, std::memory_order_acq_rel)) return made;
    // Another thread has made the context first. This one was never used, so it may be freed.
    ssl.OSSL_LIB_CTX_free(made);
    delete mine;
    return known->context;
}

uint64_t num_forks() { return forks.load(std::memory_order_relaxed); }

// All accesses to cleans_up and num_uses are sequentially consistent: a thread raises num_uses
// before it reads cleans_up, and wait_for_uses() sets cleans_up before it reads num_uses. So the
// thread sees that OpenSSL cleans up, or wait_for_uses() sees the thread.
bool is_over() { return cleans_up.load(); }

Use::Use() { num_uses.fetch_add(1); }

Use::~Use() { num_uses.fetch_sub(1); }

std::string take_trouble(const Functions& ssl) {
    const unsigned long error = ssl.ERR_get_error();
    ssl.ERR_clear_error();
    if (error == 0) return "TLS failed without a reason";
    if (library_of(error) == kLibraryOfSsl) {
        for (const Reason& one : kReasons) {
            if (one.number == reason_of(error)) return one.sentence;
        }
    }
    const char* const text = ssl.ERR_reason_error_string(error);
    return std::string("TLS failed: ") + (text ? text : "error " + std::to_string(error));
}

}  // namespace diloco::link::openssl
