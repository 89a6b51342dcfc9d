// The messages between two processes in the groups of one token: which sends meet which receives.
//
// A message above kEagerBytes travels after the receiver's grant, straight into the posted memory.
// A smaller message travels at once; the receiver keeps at most kMostEarly of them, and the sender
// counts them by the receiver's credit. A receive that is cancelled after its grant keeps one of
// kMostEarly places until its send begins, or until the channel ends. Used under the link's mutex.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "exchange/link/connection.h"
#include "exchange/link/life.h"

namespace diloco::link {

// Early eager messages, grants without a send, and grants under way: at most so many of each.
constexpr size_t kMostEarly = 1024;

// A process, and the key that it has proven; zeros where the link has no keys. A process
// that claims the nonce with another key is another peer.
using PeerId = std::pair<Nonce, PublicKey>;

// The end of a connection of a lane. Messages of later channels, and of channels without that lane,
// have not travelled over the connection.
struct End {
    int lane = 0;
    Clock::time_point when{};
};

// Another process.
struct Peer {
    PeerId id{};
    std::string name{};  // for people: rank and address
    std::vector<Lane> lanes{};
    std::map<uint64_t, std::shared_ptr<Channel>> channels{};  // by token
    int num_users = 0;                                        // channels with groups of this side
    Clock::time_point idle_since{};
    // Connections that have ended in good order: the others may still bring messages.
    std::vector<End> ends{};
    Life life{};
    std::deque<Told> told{};
    uint64_t told_bytes = 0;
};

class Channel : public std::enable_shared_from_this<Channel> {
  public:
    // kUnknown: only the peer has called groups() so far. kForming: groups() waits for the peer.
    enum class State { kUnknown, kForming, kOpen };

    Channel(Peer& peer, uint64_t token) : peer(peer), token(token), since(Clock::now()) {}

    Peer& peer;
    const uint64_t token;
    Clock::time_point since;  // this side began to form, or before that: the peer did
    State state = State::kUnknown;
    int own_lanes = 0;          // while this side is forming or open
    int num_open = 0;           // groups of this side
    std::string dead{};         // why no message can travel any more
    std::set<int> joined{};     // lanes on which the peer has said that it called groups()
    uint64_t num_lanes = 0;     // the peer's
    std::set<int> ended{};      // numbers of the groups that the peer has closed
    std::set<int> closed{};     // numbers of the groups that this side has closed
    std::set<uint64_t> told{};  // ids of the connections on which this side has said it

    // Whether the ends of connections may have taken messages of this channel.
    bool has_lost(const std::vector<End>& ends) const;
    // Whether the peer has its groups already, and sends or receives in them.
    bool has_messages() const { return !early_.empty() || !grants_.empty(); }
    // Forgets that the peer has joined: both say so again.
    void forget();
    // Forgets the early messages of a group of this side that is closed.
    void forget_group(int number);

    // Puts a frame of this channel before the bulk of its lane.
    void put(FrameKind kind, int number, uint32_t tag, uint32_t ticket, uint64_t offset,
             uint64_t total);
    void put_join(int lane, int num_lanes, bool wants_answer);
    // Says again that this side has joined, or that its group has come to an end.
    void answer_join(int lane);

    void post_send(const MessagePtr& message);
    void post_recv(const MessagePtr& message);
    // Says again that sends wait, so that receives of other sizes are noticed.
    // `busy`: connections whose peer does not read, or reads slowly.
    void offer(const std::set<const Connection*>& busy);

    void on_grant(const Frame& frame);
    void on_eager(const Frame& frame, const uint8_t* bytes);
    // Counts a small message that has left the store, or that was not stored.
    void take_eager();
    void on_credit(const Frame& frame);
    void on_offer(const Frame& frame);
    void on_refuse(const Frame& frame);
    // The receive for a fragment; null: nobody.
    MessagePtr on_data(const Frame& frame);
    // The fragment is complete in the message's memory.
    void on_data_end(const MessagePtr& message);

    // No later frame will reach the message.
    void detach(const MessagePtr& message);
    // An empty error is success.
    void finish(const MessagePtr& message, const std::string& error);
    // All messages of one group that are not done; number -1: of all groups.
    std::vector<MessagePtr> unfinished(int number) const;
    bool has_unfinished() const { return !unfinished_.empty(); }

  private:
    struct Grant {
        uint32_t ticket;
        uint64_t num_bytes;
    };
    using Waiting = std::multimap<uint64_t, MessagePtr>;  // by number and tag; equals in order

    std::string obstacle(int number) const;
    void begin(const MessagePtr& send, Grant grant);
    void grant(const MessagePtr& recv);
    void grant_next();
    void send_eager(const MessagePtr& message);
    void give_credit();
    // The error of a message whose connection has gone.
    std::string closed_by_peer() const { return "connection closed by peer: " + peer.name; }
    void refuse(const MessagePtr& message, uint32_t ticket, uint64_t theirs);
    std::string sizes_differ(const Message& message, uint64_t theirs) const;

    Waiting sends_{};                                        // without a grant
    Waiting recvs_{};                                        // without a first byte
    std::multimap<uint64_t, Grant> grants_{};                // without a send
    std::multimap<uint64_t, std::vector<uint8_t>> early_{};  // eager messages without a receive
    std::unordered_map<uint32_t, MessagePtr> granted_{};     // receives by their tickets
    std::set<uint32_t> untouched_{};                         // tickets without a first byte
    std::deque<MessagePtr> ungranted_{};                     // too many are granted
    std::deque<MessagePtr> held_{};                          // eager sends without credit
    std::map<const Message*, MessagePtr> unfinished_{};
    uint32_t last_ticket_ = 0;
    size_t num_eager_ = 0;  // sent, and not known to have left the peer's store
    size_t num_taken_ = 0;  // taken from the own store since the last credit
};

}  // namespace diloco::link
