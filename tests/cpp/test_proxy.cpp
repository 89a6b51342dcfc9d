// The words that a process and a proxy exchange, whole and byte by byte; no sockets.

#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "exchange/link/proxy.h"

using diloco::link::Proxy;
using diloco::link::ProxyRequest;

namespace {

using std::string_literals::operator""s;

const Proxy kHttp{false, "proxy.example", "3128"};
const Proxy kHttpWithUser{false, "proxy.example", "3128", "alice", "open sesame"};
const Proxy kSocks{true, "proxy.example", "1080"};
const Proxy kSocksWithUser{true, "proxy.example", "1080", "alice", "open sesame"};

// The words that were sent before each answer, and after the last one.
struct Talk {
    std::vector<std::string> sent{};
    bool is_granted = false;
    bool is_final = false;
    std::string trouble{};
};

Talk talk(const Proxy& proxy, const std::string& host, const std::vector<std::string>& answers,
          bool is_byte_by_byte) {
    Talk seen;
    ProxyRequest request(proxy, host, "29700");
    seen.sent.push_back(request.take_due());
    for (const std::string& answer : answers) {
        const size_t step = is_byte_by_byte ? 1 : answer.size();
        for (size_t i = 0; i < answer.size(); i += step) {
            // Nothing but the last byte completes an answer.
            EXPECT(!request.is_granted() && request.take_due().empty());
            if (!request.trouble().empty()) break;
            request.feed(answer.data() + i, step);
        }
        seen.sent.push_back(request.take_due());
    }
    seen.is_granted = request.is_granted();
    seen.is_final = request.is_final();
    seen.trouble = request.trouble();
    return seen;
}

void expect_granted(const Proxy& proxy, const std::string& host,
                    const std::vector<std::string>& answers, const std::vector<std::string>& sent) {
    for (const bool is_byte_by_byte : {false, true}) {
        const Talk seen = talk(proxy, host, answers, is_byte_by_byte);
        EXPECT(seen.trouble.empty() && seen.is_granted);
        EXPECT(seen.sent == sent);
    }
}

void expect_refused(const Proxy& proxy, const std::vector<std::string>& answers,
                    const std::string& trouble, bool is_final) {
    for (const bool is_byte_by_byte : {false, true}) {
        const Talk seen = talk(proxy, "a.example", answers, is_byte_by_byte);
        if (seen.trouble != trouble) std::fprintf(stderr, "got: %s\n", seen.trouble.c_str());
        EXPECT(seen.trouble == trouble && seen.is_final == is_final);
        EXPECT(seen.sent.back().empty());
    }
}

void test_http() {
    const std::string asked = "CONNECT a.example:29700 HTTP/1.1\r\nHost: a.example:29700\r\n";
    expect_granted(kHttp, "a.example", {"HTTP/1.1 200 OK\r\n\r\n"}, {asked + "\r\n", ""});
    expect_granted(kHttp, "a.example", {"HTTP/1.0 299\nVia: x\n\n"}, {asked + "\r\n", ""});
    expect_granted(kHttp, "a.example", {"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n"},
                   {asked + "\r\n", ""});
    expect_granted(kHttpWithUser, "a.example", {"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"},
                   {asked + "Proxy-Authorization: Basic YWxpY2U6b3BlbiBzZXNhbWU=\r\n\r\n", ""});
    expect_granted(kHttp, "fd00::7", {"HTTP/1.1 200 OK\r\n\r\n"},
                   {"CONNECT [fd00::7]:29700 HTTP/1.1\r\nHost: [fd00::7]:29700\r\n\r\n", ""});
}

void test_http_troubles() {
    const std::string at = "the proxy at proxy.example:3128 ";
    expect_refused(kHttp, {"HTTP/1.1 403 Forbidden\r\n"}, at + "refused: HTTP/1.1 403 Forbidden",
                   true);
    expect_refused(kHttp, {"HTTP/1.1 502 Bad\x1b[31m\n"}, at + "refused: HTTP/1.1 502 Bad?[31m",
                   false);
    expect_refused(kHttp, {"HTTP/1.1 407 No\r\n"}, at + "asks for a password", true);
    expect_refused(kHttpWithUser, {"HTTP/1.1 407 No\r\n"},
                   at + "does not accept this user and password", true);
    expect_refused(kHttpWithUser, {"HTTP/1.1 500 open sesame\r\n"}, at + "refused: HTTP/1.1 500",
                   false);
    const std::string other = "another program than a proxy answers at proxy.example:3128";
    for (const std::string& text :
         {"SSH-2.0"s, "HTTP/2 200 OK\n"s, "HTTP/1.1 2x0 OK\n"s, "\x05"s}) {
        expect_refused(kHttp, {text}, other, true);
    }
    expect_refused(kHttp, {"HTTP/1.1 200 OK\r\nA: " + std::string(5000, 'x')},
                   "the answer of " + at + "has more than 4096 bytes", true);
    const Talk seen = talk(kHttp, "a.example", {"HTTP/1.1 200 OK\r\n\r\nhello"}, false);
    EXPECT(seen.trouble == at + "sends bytes after its answer, before this process speaks");
    ProxyRequest request(kHttp, "a.example", "1");
    request.feed("HTTP/1.1 2", 10);
    request.end();
    EXPECT(request.trouble() == at + "has closed the connection before its answer was complete");
    EXPECT(!request.is_final());
}

void test_socks() {
    const std::string granted = "\5\0\0\1\1\2\3\4\5\6"s;
    expect_granted(kSocks, "a.example", {"\5\0"s, granted},
                   {"\5\1\0"s, "\5\1\0\3\11a.example\x74\x04"s, ""});
    expect_granted(kSocks, "192.0.2.7", {"\5\0"s, "\5\0\0\3\2ab\5\6"s},
                   {"\5\1\0"s, "\5\1\0\1\300\0\2\7\x74\x04"s, ""});
    expect_granted(kSocks, "fd00::7", {"\5\0"s, "\5\0\0\4"s + std::string(18, 'x')},
                   {"\5\1\0"s, "\5\1\0\4\xfd\0\0\0\0\0\0\0\0\0\0\0\0\0\0\7\x74\x04"s, ""});
    expect_granted(kSocksWithUser, "192.0.2.7", {"\5\2"s, "\1\0"s, granted},
                   {"\5\2\0\2"s, "\1\5alice\13open sesame"s, "\5\1\0\1\300\0\2\7\x74\x04"s, ""});
    // The proxy may let everybody in.
    expect_granted(kSocksWithUser, "192.0.2.7", {"\5\0"s, granted},
                   {"\5\2\0\2"s, "\5\1\0\1\300\0\2\7\x74\x04"s, ""});
}

void test_socks_troubles() {
    const std::string at = "the proxy at proxy.example:1080 ";
    const std::string other = "another program than a proxy answers at proxy.example:1080";
    expect_refused(kSocks, {"\5\377"s}, at + "asks for a password", true);
    expect_refused(kSocksWithUser, {"\5\377"s}, at + "does not accept this user and password",
                   true);
    expect_refused(kSocksWithUser, {"\5\2"s, "\1\1"s},
                   at + "does not accept this user and password", true);
    expect_refused(kSocks, {"HTTP/1.1 400"}, other, true);
    // A method that was not offered, a record of another kind, and an unknown form of address.
    expect_refused(kSocks, {"\5\2"s}, other, true);
    expect_refused(kSocksWithUser, {"\5\2"s, "\5\0"s}, other, true);
    expect_refused(kSocks, {"\5\0"s, "\4\0"s}, other, true);
    expect_refused(kSocks, {"\5\0"s, "\5\0\0\7x"s}, other, true);
    const std::pair<std::string, bool> replies[] = {
        {"general failure", false},
        {"its rules do not allow this connection", true},
        {"network unreachable", false},
        {"host unreachable", false},
        {"the target host refused the connection", false},
        {"time to live expired", false},
        {"command not supported", true},
        {"address type not supported", true},
        {"reply 9", true}};
    char code = 0;
    for (const auto& [words, is_final] : replies) {
        expect_refused(kSocks, {"\5\0"s, "\5"s + ++code}, at + "refused: " + words, is_final);
    }
    const Talk seen = talk(kSocks, "a.example", {"\5\0"s, "\5\0\0\1\1\2\3\4\5\6x"s}, false);
    EXPECT(seen.trouble == at + "sends bytes after its answer, before this process speaks");
}

// A target comes from another process: the target must not add lines to the request.
void test_targets() {
    for (const Proxy& proxy : {kHttp, kSocks}) {
        for (const std::string& host : {""s, "a b"s, "a\r\nX-Own: 1"s, std::string(256, 'a')}) {
            ProxyRequest request(proxy, host, "1");
            EXPECT(request.take_due().empty() && request.is_final());
            EXPECT(request.trouble().find("1 to 255 ASCII characters") != std::string::npos);
        }
    }
}

}  // namespace

int main() {
    test_http();
    test_http_troubles();
    test_socks();
    test_socks_troubles();
    test_targets();
    return passed("proxy");
}
