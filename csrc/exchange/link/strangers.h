// Strangers: connections that came, and whose peers have not shown yet that they may come in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

namespace diloco::link {

// Where strangers wait. Newcomers are accepted at once; when there are too many, choose() names the
// stranger that has to go. The host with most strangers loses one, so no host keeps the others out.
// An allowed peer speaks as soon as its connection is there, so silent strangers go first.
//
// The caller numbers the strangers from 1 in the order in which they came.
class Strangers {
  public:
    // `origin`: the address of the peer's host, without the port.
    void add(uint64_t id, std::string origin) { all_[id].origin = std::move(origin); }
    void remove(uint64_t id) { all_.erase(id); }

    // A byte of this stranger has come. Returns whether the stranger counted as silent before.
    bool has_spoken(uint64_t id) {
        const auto found = all_.find(id);
        return found != all_.end() && !std::exchange(found->second.has_spoken, true);
    }

    size_t size() const { return all_.size(); }
    // 0 where there is no stranger.
    uint64_t oldest() const { return all_.empty() ? 0 : all_.begin()->first; }

    // Of the host with most strangers the oldest silent one, or the oldest one where all of them
    // have spoken. Of equal hosts the one with a silent stranger loses. 0 where there is no
    // stranger.
    uint64_t choose() const {
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

  private:
    struct Stranger {
        std::string origin{};
        bool has_spoken = false;
    };

    struct Host {
        size_t count = 0;
        uint64_t silent = 0, spoken = 0;  // the oldest of each; 0 where there is none

        uint64_t chosen() const { return silent != 0 ? silent : spoken; }
        bool is_worse_than(const Host& other) const {
            if (count != other.count) return count > other.count;
            if ((silent != 0) != (other.silent != 0)) return silent != 0;
            return chosen() < other.chosen();
        }
    };

    std::map<uint64_t, Stranger> all_;  // by age
};

}  // namespace diloco::link
