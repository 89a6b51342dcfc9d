#include "exchange/store/channel.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace diloco::store {
namespace {

using Outcome = Channel::Outcome;

constexpr size_t kHeadBytes = sizeof(uint64_t);
// The size of a packet without parts: its kind and its number.
constexpr uint64_t kLeastBody = sizeof(uint8_t) + sizeof(int64_t);
constexpr size_t kReadStep = 64 * 1024;

// Appends a number in this processor's byte order, which is little endian.
template <typename Number>
void put(std::string& bytes, Number number) {
    bytes.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

// Reads what put() has written.
class Reader {
  public:
    Reader(const std::string& bytes, size_t at) : bytes_(bytes), at_(at) {}

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
    size_t at_;
};

}  // namespace

bool changes_values(Request request) {
    switch (request) {
        case Request::kSet:
        case Request::kCompareSet:
        case Request::kAdd:
        case Request::kDelete:
        case Request::kAppend:
        case Request::kMultiSet:
            return true;
        default:
            return false;
    }
}

std::string random_name() { return link::to_hex(link::random_bytes<16>()); }

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

// -------------------------------------------------------------------------------- connection

Channel::Channel(Descriptor fd, std::shared_ptr<link::Identity> identity, bool is_dialler,
                 link::TlsSession::IsAllowed is_allowed)
    : fd_(std::move(fd)) {
    if (!identity) return;
    session_ = std::make_unique<link::TlsSession>(std::move(identity), fd_.get(), is_dialler,
                                                  std::move(is_allowed));
}

Channel::~Channel() {
    if (session_) session_->close();
}

Outcome Channel::handshake() { return session_ ? session_->handshake() : Outcome::kDone; }

Outcome Channel::end(const std::string& trouble) {
    trouble_ = trouble;
    return Outcome::kClosed;
}

Outcome Channel::read(char* data, size_t size, size_t& done) {
    if (session_) return session_->read(data, size, done);
    for (done = 0; done < size;) {
        const ssize_t got = recv(fd_.get(), data + done, size - done, MSG_DONTWAIT);
        if (got > 0) {
            done += static_cast<size_t>(got);
        } else if (got == 0) {
            return end(link::kPeerHasClosed);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return Outcome::kWantsRead;
        } else if (errno != EINTR) {
            return end(is_reset(errno) ? link::kPeerHasClosed : std::strerror(errno));
        }
    }
    return Outcome::kDone;
}

Outcome Channel::write(const char* data, size_t size, size_t& done) {
    if (session_) return session_->write(data, size, done);
    for (done = 0; done < size;) {
        const ssize_t sent = send(fd_.get(), data + done, size - done, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) {
            done += static_cast<size_t>(sent);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return Outcome::kWantsWrite;
        } else if (errno != EINTR) {
            return end(is_reset(errno) ? link::kPeerHasClosed : std::strerror(errno));
        }
    }
    return Outcome::kDone;
}

bool Channel::is_over() const {
    if (session_ && session_->has_pending()) return true;
    char byte = 0;
    const ssize_t got = recv(fd_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return got >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

// ----------------------------------------------------------------------------------- packets

uint64_t Incoming::announced() const { return Reader(bytes_, 0).number<uint64_t>(); }

Outcome Incoming::read(Channel& channel, uint64_t most) {
    while (true) {
        uint64_t whole = kHeadBytes;
        if (at_ >= kHeadBytes) {
            const uint64_t size = announced();
            if (size < kLeastBody) throw std::runtime_error("a packet of the store is cut");
            if (size > most) {
                throw std::runtime_error("the other side announces a packet of " +
                                         std::to_string(size) + " bytes, and at most " +
                                         std::to_string(most) + " are taken");
            }
            whole += size;
            if (at_ == whole) return Outcome::kDone;
        }
        const size_t step = std::min<uint64_t>(whole - at_, kReadStep);
        bytes_.resize(at_ + step);
        size_t done = 0;
        const Outcome outcome = channel.read(bytes_.data() + at_, step, done);
        at_ += done;
        if (outcome != Outcome::kDone) return outcome;
    }
}

Packet Incoming::take(size_t most_parts) {
    const std::string bytes = std::exchange(bytes_, {});
    at_ = 0;
    Reader reader(bytes, kHeadBytes);
    Packet packet;
    packet.kind = reader.number<uint8_t>();
    packet.number = reader.number<int64_t>();
    while (!reader.is_at_end()) {
        packet.parts.push_back(reader.text());
        if (packet.parts.size() > most_parts) {
            throw std::runtime_error("a packet of the store has too many parts");
        }
    }
    return packet;
}

Outgoing::Outgoing(const Packet& packet) {
    uint64_t size = kLeastBody;
    for (const std::string& part : packet.parts) size += sizeof(uint64_t) + part.size();
    if (size > Packet::kMostBytes) {
        throw std::invalid_argument("a store takes at most 64 MiB at a time, got " +
                                    std::to_string(size) + " bytes");
    }
    bytes_.reserve(kHeadBytes + size);
    put(bytes_, size);
    put(bytes_, packet.kind);
    put(bytes_, packet.number);
    for (const std::string& part : packet.parts) {
        put(bytes_, uint64_t{part.size()});
        bytes_ += part;
    }
}

Outcome Outgoing::write(Channel& channel) {
    while (true) {
        size_t done = 0;
        // Write even if no byte of the packet is left: encrypted bytes may wait in a TLS session.
        const Outcome outcome = channel.write(bytes_.data() + at_, bytes_.size() - at_, done);
        at_ += done;
        if (outcome != Outcome::kDone || at_ == bytes_.size()) return outcome;
    }
}

}  // namespace diloco::store
