// A channel carries the messages between two processes in the groups of one Link::connect(), and
// matches sends with receives. Such groups share a token.
//
// A message above kEagerBytes is sent only after the receiver's grant, and is received straight
// into the posted memory. A smaller, "eager" message is sent at once. If its receive is not posted
// yet, the receiver stores it; the store has room for kMostEarly messages, and the receiver's
// credit tells the sender how many it may send. A receive that is cancelled after its grant counts
// as one of kMostEarly grants until its send begins. Used under the link's mutex.
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

// The most eager messages in the store, received grants without a send, and sent grants whose
// message has not begun to arrive.
constexpr size_t kMostEarly = 1024;

// The nonce of a process, and the key that it has proven; zeros if the link has no keys. A process
// that claims the same nonce with another key is another peer.
using PeerId = std::pair<Nonce, PublicKey>;

// The time at which a connection of a lane has ended. Only channels that began before this time
// (Channel::since) and use the lane can have lost messages.
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
    int num_users = 0;  // channels in which this process has groups
    Clock::time_point idle_since{};
    // Connections that have ended without an error. Until another one ends, or a second has passed,
    // the peer's other connections may still bring messages.
    std::vector<End> ends{};
    Life life{};
    std::deque<Told> told{};
    uint64_t told_bytes = 0;
};

class Channel : public std::enable_shared_from_this<Channel> {
  public:
    // kUnknown: only the peer has called connect() so far. kForming: connect() waits for the peer.
    enum class State { kUnknown, kForming, kOpen };

    Channel(Peer& peer, uint64_t token) : peer(peer), token(token), since(Clock::now()) {}

    Peer& peer;
    const uint64_t token;
    Clock::time_point since;  // when this process called connect(); before that, when the peer did
    State state = State::kUnknown;
    int own_lanes = 0;          // lanes of this process, from its connect() on
    int num_open = 0;           // groups that this process has not closed
    std::string dead{};         // why no message can travel any more
    std::set<int> joined{};     // lanes on which the peer has said that it called connect()
    uint64_t num_lanes = 0;     // lanes of the peer; 0: not known yet
    std::set<int> ended{};      // numbers of the groups that the peer has closed
    std::set<int> closed{};     // numbers of the groups that this process has closed
    std::set<uint64_t> told{};  // ids of connections on which this process has sent kJoin

    // Whether messages of this channel may be lost because the connections of `ends` have ended.
    bool has_lost(const std::vector<End>& ends) const;
    // Whether the peer has begun to send or receive messages in this channel.
    bool has_messages() const { return !early_.empty() || !grants_.empty(); }
    // Forgets that both processes have joined, so that both send kJoin again.
    void forget();
    // Drops the stored eager messages of a group that this process has closed.
    void forget_group(int number);

    // Queues a short frame, which is sent ahead of the large messages of the group's lane.
    void put(FrameKind kind, int number, uint32_t tag, uint32_t ticket, uint64_t offset,
             uint64_t total);
    void put_join(int lane, int num_lanes, bool wants_answer);
    // Answers the peer's kJoin: this process has joined too, or its groups have come to an end.
    void answer_join(int lane);

    void post_send(const MessagePtr& message);
    void post_recv(const MessagePtr& message);
    // Tells the peer the sizes of sends that wait for a grant, so that a receive of another size is
    // noticed. Connections in `busy`, whose peer reads slowly or not at all, are left out.
    void offer(const std::set<const Connection*>& busy);

    void on_grant(const Frame& frame);
    void on_eager(const Frame& frame, const uint8_t* bytes);
    // Counts an eager message that has left the store or was never stored, and so makes room.
    void take_eager();
    void on_credit(const Frame& frame);
    void on_offer(const Frame& frame);
    void on_refuse(const Frame& frame);
    // Returns the receive into which a fragment goes; null if it is not wanted any more.
    MessagePtr on_data(const Frame& frame);
    // Called when the fragment is complete in the message's memory.
    void on_data_end(const MessagePtr& message);

    // Removes the message from all queues, so that no later frame reaches it.
    void detach(const MessagePtr& message);
    // Completes a message with an error, or with success if `error` is empty.
    void finish(const MessagePtr& message, const std::string& error);
    // All messages of one group that are not done, or of all groups if `number` is -1.
    std::vector<MessagePtr> unfinished(int number) const;
    bool has_unfinished() const { return !unfinished_.empty(); }

  private:
    struct Grant {
        uint32_t ticket;
        uint64_t num_bytes;
    };
    // By group number and tag. Messages with the same key keep the order in which they came.
    using Waiting = std::multimap<uint64_t, MessagePtr>;

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

    Waiting sends_{};                          // sends that wait for the peer's grant
    Waiting recvs_{};                          // receives whose first byte has not come
    std::multimap<uint64_t, Grant> grants_{};  // grants of the peer whose send is not posted
    std::multimap<uint64_t, std::vector<uint8_t>> early_{};  // the store of eager messages
    std::unordered_map<uint32_t, MessagePtr> granted_{};     // receives by their tickets
    std::set<uint32_t> untouched_{};      // tickets of grants whose first byte has not come
    std::deque<MessagePtr> ungranted_{};  // receives that wait, since too many are granted
    std::deque<MessagePtr> held_{};       // eager sends that wait for credit
    std::map<const Message*, MessagePtr> unfinished_{};
    uint32_t last_ticket_ = 0;
    size_t num_eager_ = 0;  // eager messages sent for which the peer has given no credit yet
    size_t num_taken_ = 0;  // eager messages received for which no credit was given yet
};

}  // namespace diloco::link
