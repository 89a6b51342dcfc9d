// A proxy that connects a process to targets outside of its site, by HTTP CONNECT (RFC 9110,
// section 9.3.6, and RFC 7617) or SOCKS5 (RFC 1928 and RFC 1929). The proxy looks up the names of
// the targets.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>

#include "exchange/link/sockets.h"

namespace diloco::link {

struct Proxy {
    bool is_socks = false;
    std::string host{};
    std::string port{};
    std::optional<std::string> user{};
    std::string password{};

    // Texts for errors; they never contain the password.
    std::string name() const;
    std::string unreachable(const std::string& why) const;
    std::string silent() const;
};

// The request for one connection to a target. The caller owns the connection to the proxy: it sends
// the bytes of take_due(), and passes the proxy's answers to feed(). Until the request is granted,
// all bytes that arrive are the proxy's, because the link's protocols let the dialler speak first.
class ProxyRequest {
  public:
    // An answer with more bytes is refused.
    static constexpr size_t kMostBytes = 4096;

    ProxyRequest(const Proxy& proxy, const std::string& host, const std::string& port);

    // Returns the bytes to be sent now, and removes them.
    std::string take_due();
    void feed(const void* data, size_t num_bytes);
    // Call when the proxy has closed the connection.
    void end();

    // Whether the proxy has made the connection: from then on bytes travel to the target and back.
    bool is_granted() const { return step_ == Step::kGranted; }
    // Why the request has failed, in one sentence; empty while it has not.
    const std::string& trouble() const { return trouble_; }
    // Whether another attempt would fail in the same way.
    bool is_final() const { return is_final_; }
    // Whether the proxy has refused the user or the password, so that every request would fail.
    bool is_about_user() const { return is_about_user_; }

  private:
    enum class Step { kHttp, kMethod, kSignIn, kReply, kGranted };

    void read_http();
    void read_method();
    void read_sign_in();
    void read_reply();
    void ask_http();
    void ask_socks();
    void grant(size_t num_bytes);
    bool take(size_t num_bytes);
    void fail(const std::string& why, bool is_final);
    void fail_as_other();
    void refuse_user();

    const Proxy proxy_;
    const std::string host_, port_;
    Step step_;
    std::string due_{}, input_{};
    std::string trouble_{};
    bool is_final_ = false;
    bool is_about_user_ = false;
};

// The result of dial_through(), which blocks.
struct Dialled {
    Descriptor fd{};  // connected and non-blocking; empty after an error, which `trouble` names
    std::string trouble{};
    bool is_final = false;
};

// Connects to a target through a proxy, until `end`.
Dialled dial_through(const Proxy& proxy, const std::string& host, const std::string& port,
                     std::chrono::steady_clock::time_point end);

}  // namespace diloco::link
