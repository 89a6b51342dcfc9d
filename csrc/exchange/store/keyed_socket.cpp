#include "exchange/store/keyed_socket.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace diloco::store {
namespace {

using Outcome = link::TlsSession::Outcome;

constexpr size_t kHeadBytes = sizeof(uint64_t);

// Numbers are as this processor has them: little endian.
template <typename Number>
void put(std::string& bytes, Number number) {
    bytes.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

// Reads what put() has written.
class Reader {
  public:
    explicit Reader(const std::string& bytes) : bytes_(bytes) {}

    template <typename Number>
    Number number() {
        Number number{};
        std::memcpy(&number, take(sizeof(number)), sizeof(number));
        return number;
    }
    std::string text() {
        const auto size = number<uint64_t>();
        const char* const data = take(size);
        return {data, size};
    }
    bool is_at_end() const { return at_ == bytes_.size(); }

  private:
    const char* take(uint64_t size) {
        if (size > bytes_.size() - at_) throw std::runtime_error("a packet of the store is cut");
        const char* const data = bytes_.data() + at_;
        at_ += size;
        return data;
    }

    const std::string& bytes_;
    size_t at_ = 0;
};

}  // namespace

std::vector<std::string> pairs_of(const std::vector<std::string>& keys,
                                  const std::vector<std::vector<uint8_t>>& values) {
    if (keys.size() != values.size()) {
        throw std::invalid_argument("there are " + std::to_string(keys.size()) + " keys and " +
                                    std::to_string(values.size()) + " values");
    }
    std::vector<std::string> pairs;
    for (size_t i = 0; i < keys.size(); ++i) {
        pairs.push_back(keys[i]);
        pairs.push_back(text_of(values[i]));
    }
    return pairs;
}

std::string words_of_late(const std::vector<std::string>& keys, int64_t milliseconds) {
    std::string list;
    for (const std::string& key : keys) list += (list.empty() ? "" : ", ") + key;
    return "nobody set all of these keys of the store within " + std::to_string(milliseconds) +
           " ms: " + list;
}

KeyedSocket::KeyedSocket(Descriptor fd, std::shared_ptr<link::Identity> identity, bool is_dialler,
                         link::TlsSession::IsAllowed is_allowed)
    : fd_(std::move(fd)),
      session_(std::move(identity), fd_.get(), is_dialler, std::move(is_allowed)) {}

KeyedSocket::~KeyedSocket() { session_.close(); }

void KeyedSocket::wait_for(Outcome outcome, Clock::time_point end) {
    if (outcome == Outcome::kFailed) throw Refused(session_.trouble());
    if (outcome == Outcome::kClosed) throw std::runtime_error(session_.trouble());
    pollfd one{fd_.get(), static_cast<short>(outcome == Outcome::kWantsRead ? POLLIN : POLLOUT), 0};
    while (true) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()).count();
        if (left <= 0) throw std::runtime_error("the other side did not answer in time");
        // poll() takes an int; a longer time comes in several parts.
        const int ready = poll(&one, 1, static_cast<int>(std::min<int64_t>(left, 1 << 30)));
        if (ready > 0) return;
        if (ready < 0 && errno != EINTR) throw std::runtime_error(std::strerror(errno));
    }
}

void KeyedSocket::shake_hands(Clock::time_point end) {
    while (true) {
        const Outcome outcome = session_.handshake();
        if (outcome == Outcome::kDone) return;
        wait_for(outcome, end);
    }
}

void KeyedSocket::write(const std::string& bytes, Clock::time_point end) {
    size_t at = 0;
    while (true) {
        size_t done = 0;
        const Outcome outcome = session_.write(bytes.data() + at, bytes.size() - at, done);
        at += done;
        if (outcome == Outcome::kDone) return;
        wait_for(outcome, end);
    }
}

void KeyedSocket::read(std::string& bytes, Clock::time_point end) {
    size_t at = 0;
    while (at < bytes.size()) {
        size_t done = 0;
        const Outcome outcome = session_.read(bytes.data() + at, bytes.size() - at, done);
        at += done;
        if (outcome == Outcome::kDone) continue;
        wait_for(outcome, end);
    }
}

void KeyedSocket::send(const Packet& packet, Clock::time_point end) {
    std::string body;
    put(body, packet.kind);
    put(body, packet.number);
    for (const std::string& part : packet.parts) {
        put(body, uint64_t{part.size()});
        body += part;
    }
    if (body.size() > Packet::kMostBytes) {
        throw std::invalid_argument("a store with keys takes at most 64 MiB at a time, got " +
                                    std::to_string(body.size()) + " bytes");
    }
    std::string bytes;
    put(bytes, uint64_t{body.size()});
    write(bytes + body, end);
}

Packet KeyedSocket::receive(Clock::time_point end) {
    std::string head(kHeadBytes, '\0');
    read(head, end);
    const auto size = Reader(head).number<uint64_t>();
    if (size > Packet::kMostBytes) {
        throw std::runtime_error("the other side announces a packet of " + std::to_string(size) +
                                 " bytes, and at most 64 MiB are taken");
    }
    std::string body(size, '\0');
    read(body, end);
    Reader reader(body);
    Packet packet;
    packet.kind = reader.number<uint8_t>();
    packet.number = reader.number<int64_t>();
    while (!reader.is_at_end()) packet.parts.push_back(reader.text());
    return packet;
}

bool KeyedSocket::is_over() const {
    if (session_.has_pending()) return true;
    char byte = 0;
    const ssize_t got = recv(fd_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return got >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

void KeyedSocket::shut_down() { ::shutdown(fd_.get(), SHUT_RDWR); }

}  // namespace diloco::store
