#include "exchange/link/proxy.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>

namespace diloco::link {
namespace {

constexpr char kHttpBegin[] = "HTTP/1.";
// Where the status stands in "HTTP/1.1 200 Connection established".
constexpr size_t kStatusAt = 9, kStatusEnd = 12;
constexpr size_t kMostShown = 120;
constexpr size_t kMostField = 255;  // the longest SOCKS field: its length is one byte

constexpr char kSocks = 5, kSignInVersion = 1;
constexpr char kNoSignIn = 0, kByPassword = 2;
constexpr uint8_t kNoMethod = 0xff;
constexpr char kConnect = 1;
constexpr char kIpv4 = 1, kName = 3, kIpv6 = 4;

uint8_t byte_of(const std::string& bytes, size_t at) { return static_cast<uint8_t>(bytes[at]); }

std::string base64(const std::string& bytes) {
    constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string text;
    for (size_t i = 0; i < bytes.size(); i += 3) {
        const size_t num = std::min<size_t>(3, bytes.size() - i);
        uint32_t three = 0;
        for (size_t j = 0; j < 3; ++j) three = three << 8 | (j < num ? byte_of(bytes, i + j) : 0);
        for (size_t j = 0; j < 4; ++j) {
            text += j <= num ? kDigits[three >> (18 - 6 * j) & 63] : '=';
        }
    }
    return text;
}

// A SOCKS field: one byte with the length, then the text.
std::string field(const std::string& text) { return static_cast<char>(text.size()) + text; }

// Whether a text has no white space, no control character and no byte beyond ASCII.
bool is_plain(const std::string& text) {
    return !text.empty() &&
           std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c < 0x7f; });
}

// Where the head of an HTTP answer ends, after its empty line; 0 if that line has not come.
size_t end_of_head(const std::string& text) {
    size_t end = 0;
    for (size_t at = 0; (end = text.find('\n', at)) != std::string::npos; at = end + 1) {
        if (end == at || (end == at + 1 && text[at] == '\r')) return end + 1;
    }
    return 0;
}

std::string words_of(uint8_t reply) {
    switch (reply) {
        case 1:
            return "general failure";
        case 2:
            return "its rules do not allow this connection";
        case 3:
            return "network unreachable";
        case 4:
            return "host unreachable";
        case 5:
            return "the target host refused the connection";
        case 6:
            return "time to live expired";
        case 7:
            return "command not supported";
        case 8:
            return "address type not supported";
        default:
            return "reply " + std::to_string(reply);
    }
}

// Whether another attempt may succeed after this SOCKS reply code.
bool may_pass(uint8_t reply) { return reply == 1 || (reply >= 3 && reply <= 6); }

}  // namespace

std::string Proxy::name() const { return "the proxy at " + name_of_place(host, port); }

std::string Proxy::unreachable(const std::string& why) const {
    return name() + " cannot be reached: " + why;
}

std::string Proxy::silent() const { return name() + " gives no answer"; }

ProxyRequest::ProxyRequest(const Proxy& proxy, const std::string& host, const std::string& port)
    : proxy_(proxy), host_(host), port_(port), step_(proxy.is_socks ? Step::kMethod : Step::kHttp) {
    // The target may come from another process, and must not add lines to the request.
    if (!is_plain(host) || !is_plain(port) || host.size() > kMostField) {
        fail(proxy_.name() + " can only be asked for a host of 1 to 255 ASCII characters", true);
    } else if (proxy.is_socks) {
        due_ = {kSocks, static_cast<char>(proxy.user ? 2 : 1), kNoSignIn};
        if (proxy.user) due_ += kByPassword;
    } else {
        ask_http();
    }
}

void ProxyRequest::ask_http() {
    const std::string target = name_of_place(host_, port_);
    due_ = "CONNECT " + target + " HTTP/1.1\r\nHost: " + target + "\r\n";
    if (proxy_.user) {
        due_ += "Proxy-Authorization: Basic " + base64(*proxy_.user + ":" + proxy_.password);
        due_ += "\r\n";
    }
    due_ += "\r\n";
}

void ProxyRequest::ask_socks() {
    std::array<char, sizeof(in6_addr)> number;
    due_ = {kSocks, kConnect, 0};
    if (inet_pton(AF_INET, host_.c_str(), number.data()) == 1) {
        due_ += kIpv4 + std::string(number.data(), sizeof(in_addr));
    } else if (inet_pton(AF_INET6, host_.c_str(), number.data()) == 1) {
        due_ += kIpv6 + std::string(number.data(), sizeof(in6_addr));
    } else {
        due_ += kName + field(host_);
    }
    const int port = std::atoi(port_.c_str());
    due_ += static_cast<char>(port >> 8);
    due_ += static_cast<char>(port & 255);
    step_ = Step::kReply;
}

std::string ProxyRequest::take_due() {
    std::string due;
    std::swap(due, due_);
    return due;
}

void ProxyRequest::feed(const void* data, size_t num_bytes) {
    input_.append(static_cast<const char*>(data), num_bytes);
    if (input_.size() > kMostBytes) {
        fail("the answer of " + proxy_.name() + " has more than 4096 bytes", true);
    }
    Step step;
    do {
        step = step_;
        if (!trouble_.empty() || input_.empty()) return;
        switch (step_) {
            case Step::kHttp:
                read_http();
                break;
            case Step::kMethod:
                read_method();
                break;
            case Step::kSignIn:
                read_sign_in();
                break;
            case Step::kReply:
                read_reply();
                break;
            case Step::kGranted:
                fail(proxy_.name() + " sends bytes after its answer, before this process speaks",
                     true);
                break;
        }
    } while (step != step_);
}

void ProxyRequest::end() {
    if (!trouble_.empty() || is_granted()) return;
    fail(proxy_.name() + " has closed the connection before its answer was complete", false);
}

void ProxyRequest::read_http() {
    const size_t known = std::min(input_.size(), sizeof(kHttpBegin) - 1);
    const bool is_http = input_.compare(0, known, kHttpBegin, known) == 0;
    const size_t line_end = input_.find('\n');
    if (is_http && line_end == std::string::npos) return;
    std::string line = input_.substr(0, line_end);
    if (!line.empty() && line.back() == '\r') line.pop_back();
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    if (!is_http || line.size() < kStatusEnd || line[kStatusAt - 1] != ' ' ||
        !std::all_of(line.begin() + kStatusAt, line.begin() + kStatusEnd, is_digit) ||
        (line.size() > kStatusEnd && line[kStatusEnd] != ' ')) {
        return fail_as_other();
    }
    const int status = std::stoi(line.substr(kStatusAt, kStatusEnd - kStatusAt));
    if (status == 407) return refuse_user();
    // An interim answer; the final one follows.
    if (status >= 100 && status < 200 && status != 101) {
        const size_t head = end_of_head(input_);
        input_.erase(0, head);
        if (head > 0) read_http();
        return;
    }
    if (status >= 200 && status < 300) {
        const size_t head = end_of_head(input_);
        if (head > 0) grant(head);
        return;
    }
    // The proxy chooses the text of the reason. If it echoes the password, only the status is kept.
    const bool is_echo = !proxy_.password.empty() && line.find(proxy_.password) != line.npos;
    line.resize(is_echo ? kStatusEnd : std::min(line.size(), kMostShown));
    std::replace_if(line.begin(), line.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
    const bool is_passing = status == 408 || status == 429;  // a time-out, too many requests
    fail(proxy_.name() + " refused: " + line, status / 100 == 4 && !is_passing);
}

void ProxyRequest::read_method() {
    constexpr size_t kBytes = 2;
    const bool is_socks = input_[0] == kSocks;
    if (is_socks && input_.size() < kBytes) return;
    const uint8_t method = is_socks ? byte_of(input_, 1) : kNoMethod;
    if (is_socks && method == kNoMethod) return refuse_user();
    if (!is_socks || (method != kNoSignIn && !(proxy_.user && method == kByPassword))) {
        return fail_as_other();
    }
    if (!take(kBytes)) return;
    if (method == kNoSignIn) return ask_socks();
    due_ = kSignInVersion + field(*proxy_.user) + field(proxy_.password);
    step_ = Step::kSignIn;
}

void ProxyRequest::read_sign_in() {
    constexpr size_t kBytes = 2;
    if (input_[0] != kSignInVersion) {
        return fail_as_other();
    }
    if (input_.size() < kBytes) return;
    if (input_[1] != 0) return refuse_user();
    if (take(kBytes)) ask_socks();
}

void ProxyRequest::read_reply() {
    constexpr size_t kHead = 4, kPort = 2;
    if (input_[0] != kSocks) {
        return fail_as_other();
    }
    if (input_.size() < 2) return;
    if (const uint8_t reply = byte_of(input_, 1); reply != 0) {
        return fail(proxy_.name() + " refused: " + words_of(reply), !may_pass(reply));
    }
    // The address in the proxy's reply is not needed, only its length.
    if (input_.size() <= kHead) return;
    size_t num_bytes = kHead + kPort;
    switch (input_[kHead - 1]) {
        case kIpv4:
            num_bytes += sizeof(in_addr);
            break;
        case kIpv6:
            num_bytes += sizeof(in6_addr);
            break;
        case kName:
            num_bytes += 1 + byte_of(input_, kHead);
            break;
        default:
            return fail_as_other();
    }
    if (input_.size() >= num_bytes) grant(num_bytes);
}

void ProxyRequest::grant(size_t num_bytes) {
    input_.erase(0, num_bytes);
    step_ = Step::kGranted;
}

// Removes a complete answer from the input; returns whether no further bytes follow it.
bool ProxyRequest::take(size_t num_bytes) {
    input_.erase(0, num_bytes);
    if (input_.empty()) return true;
    fail_as_other();
    return false;
}

void ProxyRequest::fail(const std::string& why, bool is_final) {
    trouble_ = why;
    is_final_ = is_final;
    due_.clear();
}

void ProxyRequest::fail_as_other() {
    fail("another program than a proxy answers at " + name_of_place(proxy_.host, proxy_.port),
         true);
}

void ProxyRequest::refuse_user() {
    fail(proxy_.name() +
             (proxy_.user ? " does not accept this user and password" : " asks for a password"),
         true);
    is_about_user_ = true;
}

Dialled dial_through(const Proxy& proxy, const std::string& host, const std::string& port,
                     std::chrono::steady_clock::time_point end) {
    Dialled result;
    result.trouble = "its host has no address";
    const auto addresses = look_up(proxy.host, proxy.port, AI_NUMERICSERV);
    for (size_t i = 0; i < addresses.size() && !result.fd; ++i) {
        // Each address gets an equal share of the time that is left, in case it does not answer.
        const auto now = std::chrono::steady_clock::now();
        const auto share = (end - now) / static_cast<int64_t>(addresses.size() - i);
        result.fd = dial(addresses[i], now + share, result.trouble);
    }
    if (!result.fd) {
        result.trouble = proxy.unreachable(result.trouble);
        return result;
    }
    ProxyRequest request(proxy, host, port);
    while (request.trouble().empty()) {
        const std::string due = request.take_due();
        if (!due.empty() && send(result.fd.get(), due.data(), due.size(), MSG_NOSIGNAL) !=
                                static_cast<ssize_t>(due.size())) {
            request.end();
            continue;
        }
        if (request.is_granted()) {
            result.trouble.clear();
            return result;
        }
        if (!is_ready(result.fd.get(), POLLIN, end)) break;
        std::array<char, ProxyRequest::kMostBytes> bytes;
        const ssize_t got = recv(result.fd.get(), bytes.data(), bytes.size(), 0);
        if (got > 0) request.feed(bytes.data(), static_cast<size_t>(got));
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) request.end();
    }
    result.fd.reset();
    result.trouble = request.trouble().empty() ? proxy.silent() : request.trouble();
    result.is_final = request.is_final();
    return result;
}

}  // namespace diloco::link
