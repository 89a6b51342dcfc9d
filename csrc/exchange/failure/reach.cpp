#include "exchange/failure/reach.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "exchange/link/sockets.h"

namespace diloco {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// The most descriptors at once: a process may not have more.
constexpr size_t kMostAtOnce = 128;
// A connection attempt; the descriptor is -1 when the attempt is over.
struct Attempt {
    int fd = -1;
    Answer answer = Answer::kUnknown;

    void end(int error) {
        if (fd < 0) return;
        answer = answer_of(error);
        close(fd);
        fd = -1;
    }

    static Answer answer_of(int error) {
        switch (error) {
            case 0:
                return Answer::kReached;
            case ECONNREFUSED:
                return Answer::kRefused;
            case EADDRNOTAVAIL:
            case EAGAIN:
            case ENOBUFS:
            case ENOMEM:
                return Answer::kUnknown;
            default:
                return Answer::kSilent;
        }
    }
};

Attempt begin(const std::string& text) {
    Attempt attempt;
    const auto place = split_place(text);
    if (!place) return attempt;
    const auto found = look_up(place->first, place->second, AI_NUMERICHOST | AI_NUMERICSERV);
    if (found.empty()) return attempt;
    const Address& address = found.front();
    attempt.fd = socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (attempt.fd < 0) return attempt;
    if (connect(attempt.fd, address.get(), address.length) == 0) {
        attempt.end(0);
    } else if (errno != EINPROGRESS) {
        attempt.end(errno);
    }
    return attempt;
}

void wait_for(std::vector<Attempt>& attempts, Clock::time_point deadline) {
    while (true) {
        std::vector<pollfd> open;
        std::vector<Attempt*> owners;
        for (Attempt& attempt : attempts) {
            if (attempt.fd < 0) continue;
            open.push_back({attempt.fd, POLLOUT, 0});
            owners.push_back(&attempt);
        }
        const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
        if (open.empty() || left <= 0) break;
        if (poll(open.data(), open.size(), static_cast<int>(left)) <= 0) continue;
        for (size_t i = 0; i < open.size(); ++i) {
            if (open[i].revents == 0) continue;
            int error = 0;
            socklen_t length = sizeof(error);
            getsockopt(open[i].fd, SOL_SOCKET, SO_ERROR, &error, &length);
            owners[i]->end(error);
        }
    }
    for (Attempt& attempt : attempts) attempt.end(ETIMEDOUT);
}

}  // namespace

Listener::Listener(const std::string& interface) {
    for (const Address& address : own_addresses(interface)) {
        fd_ = listen_at(address);
        if (fd_ >= 0) break;
    }
    if (fd_ >= 0) address_ = name_of_socket(fd_);
}

Listener::~Listener() { close(); }

void Listener::drain() const {
    if (fd_ < 0) return;
    while (true) {
        const int fd = accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC);
        if (fd < 0) return;
        ::close(fd);
    }
}

void Listener::close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
}

std::vector<Answer> try_to_reach(const std::vector<std::string>& addresses, milliseconds limit) {
    std::vector<Answer> answers;
    for (size_t first = 0; first < addresses.size(); first += kMostAtOnce) {
        const auto deadline = Clock::now() + limit;
        std::vector<Attempt> attempts;
        for (size_t i = first; i < std::min(first + kMostAtOnce, addresses.size()); ++i) {
            attempts.push_back(begin(addresses[i]));
        }
        wait_for(attempts, deadline);
        for (const Attempt& attempt : attempts) answers.push_back(attempt.answer);
    }
    return answers;
}

Ways::Ways(int64_t replica, const std::vector<int64_t>& members,
           const std::vector<std::string>& addresses, milliseconds patience, milliseconds limit)
    : patience_(patience), limit_(limit) {
    for (size_t i = 0; i < std::min(members.size(), addresses.size()); ++i) {
        if (members[i] == replica || addresses[i].empty()) continue;
        members_.push_back(members[i]);
        addresses_.push_back(addresses[i]);
    }
    constexpr milliseconds kEachPeer{20};
    period_ =
        std::max<Clock::duration>(std::clamp(limit / 8, milliseconds(200), milliseconds(5000)),
                                  kEachPeer * static_cast<int>(members_.size()));
}

Ways::Results Ways::try_all(milliseconds patience) const {
    Results results;
    const auto answers = try_to_reach(addresses_, patience);
    for (size_t i = 0; i < answers.size(); ++i) {
        if (answers[i] == Answer::kUnknown) continue;
        const bool is_reached = answers[i] == Answer::kReached;
        (is_reached ? results.reached : results.unreached).push_back(members_[i]);
        if (answers[i] == Answer::kRefused) results.refused.push_back(members_[i]);
    }
    return results;
}

void Ways::look() {
    const auto now = Clock::now();
    if (members_.empty() || now - last_look_ < period_) return;
    const auto passed = std::min<Clock::duration>(now - last_look_, 2 * period_);
    last_look_ = now;
    const Results results =
        try_all(std::min(patience_, std::chrono::duration_cast<milliseconds>(limit_ / 4)));
    for (const int64_t member : results.reached) unreached_.erase(member);
    for (const int64_t member : results.unreached) unreached_[member] += passed;
}

void Ways::forgive() {
    unreached_.clear();
    last_look_ = Clock::now();
}

std::vector<int64_t> Ways::lost() const {
    std::vector<int64_t> lost;
    for (const auto& [member, duration] : unreached_) {
        if (duration >= limit_) lost.push_back(member);
    }
    return lost;
}

}  // namespace diloco
