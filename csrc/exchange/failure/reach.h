// Whether the members can connect to each other: each listens at an address, which the others try.
//
// The kernel answers for a process, so a connection does not prove that the process runs, only that
// packets pass and that the process has not ended.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace diloco {

class Listener {
  public:
    // Does not listen.
    Listener() = default;
    // Listens where gloo would: on `interface` (the first of a comma-separated list), else at the
    // address of the host's name, else on loopback. Where that fails, there is no address.
    explicit Listener(const std::string& interface);
    ~Listener();
    Listener(const Listener&) = delete;
    Listener& operator=(const Listener&) = delete;

    // "host:port"; empty without a listener.
    const std::string& address() const { return address_; }

    // Ends the connections that have come, so that there is room for others.
    void drain() const;

    // In a forked child the socket belongs to the parent: there a Listener must be leaked.
    void close();

  private:
    int fd_ = -1;
    std::string address_;
};

enum class Answer {
    kReached,
    kRefused,  // the host is there, and nothing listens
    kSilent,   // or no way to the host
    kUnknown,  // this process could not try: no address, or no descriptor left
};

// Tries all addresses at once; an address that has not answered within the limit is silent.
std::vector<Answer> try_to_reach(const std::vector<std::string>& addresses,
                                 std::chrono::milliseconds limit);

// The ways to the other members of an epoch.
class Ways {
  public:
    using Clock = std::chrono::steady_clock;

    // `addresses`: one for each member; "": unknown, and the way to that member is never judged.
    // `patience`: for one answer. `limit`: for calling a way lost.
    Ways(int64_t replica, const std::vector<int64_t>& members,
         const std::vector<std::string>& addresses, std::chrono::milliseconds patience,
         std::chrono::milliseconds limit);

    // A member that could not be tried is in neither list.
    struct Results {
        std::vector<int64_t> reached;
        std::vector<int64_t> unreached;
        std::vector<int64_t> refused;  // the unreached members where nothing listens
    };

    // From any thread; the functions below are for the watcher's thread.
    Results try_all(std::chrono::milliseconds patience) const;
    Results try_all() const { return try_all(patience_); }

    // Tries the ways, at most once in a period that depends on the limit and the number of members.
    void look();

    // Call when a wait is over or has progressed.
    void forgive();

    // Members that could not be reached for the limit, on this process's clock; as
    // Pulse::suspects().
    std::vector<int64_t> lost() const;

  private:
    std::vector<int64_t> members_;
    std::vector<std::string> addresses_;
    std::chrono::milliseconds patience_;
    Clock::duration limit_;
    Clock::duration period_;
    std::map<int64_t, Clock::duration> unreached_;
    Clock::time_point last_look_{};
};

}  // namespace diloco
