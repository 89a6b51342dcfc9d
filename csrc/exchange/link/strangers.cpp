#include "exchange/link/strangers.h"

#include <sys/eventfd.h>
#include <sys/resource.h>

#include <algorithm>
#include <utility>

namespace diloco::link {
namespace {

// The limit is not raised above this number, because children inherit the limit, and some programs
// close all descriptors up to it when they start.
constexpr rlim_t kMostDescriptors = 1 << 20;
constexpr size_t kReserve = 16;

}  // namespace

// --------------------------------------------------------------------------- who has to go

void Strangers::add(uint64_t id, std::string origin) { all_[id].origin = std::move(origin); }

bool Strangers::hear(uint64_t id) {
    const auto found = all_.find(id);
    return found != all_.end() && !std::exchange(found->second.has_spoken, true);
}

bool Strangers::Host::is_worse_than(const Host& other) const {
    if (count != other.count) return count > other.count;
    if ((silent != 0) != (other.silent != 0)) return silent != 0;
    return chosen() < other.chosen();
}

uint64_t Strangers::choose() const {
    std::map<std::string, Host> hosts;
    for (const auto& [id, stranger] : all_) {
        Host& host = hosts[stranger.origin];
        ++host.count;
        uint64_t& oldest = stranger.has_spoken ? host.spoken : host.silent;
        if (oldest == 0) oldest = id;
    }
    Host worst;
    for (const auto& [origin, host] : hosts) {
        if (host.is_worse_than(worst)) worst = host;
    }
    return worst.chosen();
}

std::string origin_of(int fd) {
    const auto place = split_place(name_of_peer(fd));
    return place ? place->first : "";
}

// --------------------------------------------------------------------------- descriptors

int64_t raise_descriptors() {
    rlimit limits{};
    getrlimit(RLIMIT_NOFILE, &limits);
    const rlimit raised{std::min(limits.rlim_max, kMostDescriptors), limits.rlim_max};
    if (limits.rlim_cur < raised.rlim_cur && setrlimit(RLIMIT_NOFILE, &raised) == 0) {
        limits = raised;
    }
    return static_cast<int64_t>(std::min(limits.rlim_cur, kMostDescriptors));
}

size_t most_strangers() {
    constexpr int64_t kLeast = 16, kMost = 256;
    return static_cast<size_t>(std::clamp(raise_descriptors() / 4, kLeast, kMost));
}

void Reserve::fill() {
    while (kept_.size() < kReserve) {
        Descriptor one([] { return eventfd(0, EFD_CLOEXEC); });
        if (!one) return;
        kept_.push_back(std::move(one));
    }
}

bool Reserve::release() {
    if (kept_.empty()) return false;
    kept_.pop_back();
    return true;
}

}  // namespace diloco::link
