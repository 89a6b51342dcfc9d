// Signs of life of other processes, and short messages between processes.
//
// A link's thread sends a beat each half second to every peer that is in a group with this process
// or in a list of reach(), even while the program computes or holds Python's GIL. A beat says how
// far its process is, and how many bytes of rounds it has received from the peer. TCP's own
// acknowledgements would not do: they count beats too, and come from a relay or proxy if there is
// one.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "exchange/link/connection.h"

namespace diloco::link {

constexpr std::chrono::milliseconds kBeatPeriod{500};
constexpr uint64_t kMostTellBytes = 64 * 1024;  // the longest message of Link::tell()
// The most bytes of messages that wait to be sent to one peer, and of one peer's messages that wait
// here to be read. Each message counts kTellCost bytes more than it has.
constexpr uint64_t kMostToldBytes = 1024 * 1024;
constexpr uint64_t kTellCost = 64;

// The present work of a program. kUnknown, whose name is "": the program has not named any.
// kCutOff: the program cannot take part in a change of its group.
enum class Phase : uint8_t {
    kUnknown,
    kSteps,
    kExchange,
    kEvaluation,
    kCheckpoint,
    kCopying,
    kCutOff
};
const char* name_of(Phase phase);
// Throws std::invalid_argument for a text that names no phase.
Phase phase_of(const std::string& name);

// A clock that counts a pause between two ticks as at most a second. If this process was stopped
// for a minute, its peers do not seem to have been silent for that minute.
class OwnClock {
  public:
    explicit OwnClock(Clock::time_point now) : ticked_at_(now) {}
    Clock::duration at(Clock::time_point now) const;
    void tick(Clock::time_point now);

  private:
    Clock::duration passed_{};
    Clock::time_point ticked_at_;
};

// The signs of life of another process. Times are in seconds of the OwnClock.
struct PeerLife {
    std::string nonce{};
    // Seconds since the last byte came on any lane; infinite before the first byte.
    double silent_s = std::numeric_limits<double>::infinity();
    // Seconds since the peer's inner step changed, or bytes of a round went in either direction.
    double still_s = std::numeric_limits<double>::infinity();
    uint64_t inner_step = 0;
    std::string phase{};
    bool is_connected = false;
    bool is_refused = false;  // see Life::refuse()
};

class Life {
  public:
    // hear(): bytes of any kind have come from the peer. hear_beat(): a beat. hear_round(): bytes
    // of a round.
    void hear(Clock::duration at);
    void hear_beat(const Frame& beat, Clock::duration at);
    void hear_round(uint64_t num_bytes, Clock::duration at);
    // The number of bytes of rounds that have come from the peer.
    uint64_t num_heard() const { return num_heard_; }

    // The four functions below report direct dials, without relay and proxy.
    // The dial has led to the peer.
    void accept(const Address& address);
    // A host has accepted the TCP connection, but has not yet shown that it is the peer.
    void take(const Address& address);
    // The address refuses connections. If the peer has accepted there before, two refusals at least
    // 0.3 s apart and a second of silence mean that the peer has ended.
    void refuse(const Address& address, Clock::time_point now);
    // Another process answers at the address, which counts as two refusals.
    void replace(const Address& address, Clock::time_point now);
    const std::optional<Address>& address() const { return address_; }

    PeerLife facts(Clock::duration at) const;

  private:
    std::optional<Address> address_{};
    std::optional<Clock::time_point> first_refusal_{}, last_refusal_{};
    bool is_replaced_ = false;  // another process answers at address_
    std::optional<Clock::duration> heard_at_{}, moved_at_{};
    uint32_t last_beat_ = 0;
    // num_sent_: the bytes of rounds from this process that the peer says it has received.
    uint64_t inner_step_ = 0, num_heard_ = 0, num_sent_ = 0;
    Phase phase_ = Phase::kUnknown;
};

// A received message that waits for a call of Link::told(). `service` is the hash of a name.
struct Told {
    uint64_t service = 0;
    std::vector<uint8_t> bytes{};
};

}  // namespace diloco::link
