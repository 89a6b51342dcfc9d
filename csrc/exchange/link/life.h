// Signs of life of other processes, and short messages between processes.
//
// The thread of a link sends a beat each half second to every peer that a group has, or that
// reach() has asked for. A program that computes, or holds the interpreter's lock, beats all the
// same. A beat says how far its process is, and how many bytes of rounds have come from the peer:
// acknowledgements of the kernel would count the beats too, and behind a relay or a proxy they are
// not the peer's.
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
constexpr uint64_t kMostTellBytes = 64 * 1024;  // of one message
// That wait for a peer, and that a peer may have waiting here; each counts some bytes more.
constexpr uint64_t kMostToldBytes = 1024 * 1024;
constexpr uint64_t kTellCost = 64;

// The work of a program; the empty text: the program has not named any. "cut off": it cannot take
// part in a change of its group.
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

// Time as this process lives it: a standstill of the link's thread counts at most a second, and is
// no silence of others.
class OwnClock {
  public:
    explicit OwnClock(Clock::time_point now) : ticked_at_(now) {}
    Clock::duration at(Clock::time_point now) const;
    void tick(Clock::time_point now);

  private:
    Clock::duration passed_{};
    Clock::time_point ticked_at_;
};

// The life of another process, as this one knows it; times by the OwnClock.
struct PeerLife {
    std::string nonce{};
    // Since the last byte on any lane; infinite before the first.
    double silent_s = std::numeric_limits<double>::infinity();
    // Since the peer's inner step moved, or bytes of a round in either direction.
    double still_s = std::numeric_limits<double>::infinity();
    uint64_t inner_step = 0;
    std::string phase{};
    bool is_connected = false;
    bool is_refused = false;  // see Life::refuse()
};

class Life {
  public:
    void hear(Clock::duration at);
    void hear_beat(const Frame& beat, Clock::duration at);
    void hear_round(uint64_t num_bytes, Clock::duration at);
    // Bytes of rounds from the peer.
    uint64_t num_heard() const { return num_heard_; }

    // A dial that was neither relayed nor made by a proxy has led to the peer; or to a host that
    // takes the connection, and may not be the peer.
    void accept(const Address& address);
    void take(const Address& address);
    // The address refuses connections. An address that has accepted before, and refuses twice, says
    // after a second of silence that the peer has ended; another process there says it at once.
    void refuse(const Address& address, Clock::time_point now);
    void replace(const Address& address, Clock::time_point now);
    const std::optional<Address>& address() const { return address_; }

    PeerLife facts(Clock::duration at) const;

  private:
    std::optional<Address> address_{};
    std::optional<Clock::time_point> first_refusal_{}, last_refusal_{};
    bool is_replaced_ = false;  // another process greets there
    std::optional<Clock::duration> heard_at_{}, moved_at_{};
    uint32_t last_beat_ = 0;
    uint64_t inner_step_ = 0, num_heard_ = 0, num_sent_ = 0;  // sent: as the peer says
    Phase phase_ = Phase::kUnknown;
};

// A message that waits to be asked for; by the hash of its service's name.
struct Told {
    uint64_t service = 0;
    std::vector<uint8_t> bytes{};
};

}  // namespace diloco::link
