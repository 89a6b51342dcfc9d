// One TCP port for all messages of a process: the link to the other members of an exchange.
//
// A link has one listening socket, one thread, and for each lane to a peer one or two connections.
// The connections belong to the peer's process (its nonce) and not to a group: a change of the
// group opens connections to newcomers only. Both processes dial where both have an address, and
// each sends over the connection that it dialled; a process that cannot dial sends over the
// connection that its peer dialled. Two processes that cannot be dialled each dial a relay, which
// copies bytes. A process with a proxy dials peers and relays through the proxy.
//
// A link with a key speaks TLS only: below the greeting each process proves that it holds an
// allowed key, and a peer is known by its nonce and its key.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "exchange/link/channel.h"
#include "exchange/link/copies.h"
#include "exchange/link/life.h"
#include "exchange/link/strangers.h"

namespace diloco {

namespace link {

// The attempts to connect a lane.
struct Dial {
    std::shared_ptr<Peer> peer{};
    int lane = 0;
    std::vector<Address> addresses{};  // of the peer, of its relay, or of the proxy
    bool is_relayed = false;
    bool is_for_copies = false;
    bool is_redial = false;  // to learn whether the host refuses; other dials take its place
    std::pair<std::string, std::string> target{};  // host and port of the peer or its relay
    size_t next = 0;
    Clock::duration share{};  // for one attempt
    Clock::time_point retry_at{};
    bool is_over = false;  // there will be no further attempt
    std::chrono::milliseconds pause{100};
    ConnectionPtr connection{};
    std::string trouble{};  // of the last attempt

    // When the attempt under way began.
    Clock::time_point begin() const { return connection->deadline - share; }
};

// The public keys that may connect. Threads share it.
class Keyring {
  public:
    void replace(std::set<PublicKey> keys) {
        const std::lock_guard<std::mutex> lock(mutex_);
        keys_ = std::move(keys);
    }
    bool has(const PublicKey& key) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        return keys_.count(key) > 0;
    }

  private:
    mutable std::mutex mutex_;
    std::set<PublicKey> keys_;
};

// How this process sends to a peer over a lane.
struct LaneFacts {
    bool is_own = false;    // this process has dialled the connection
    std::string trouble{};  // why the dial of this process has failed
    TcpFacts tcp{};         // of the connection
};

// How the others find a process: 32 hexadecimal digits, host:port or "", the public key as 64
// hexadecimal digits or "", and host:port of the relay where a process without an address waits.
struct Place {
    std::string nonce{};
    std::string address{};
    std::string key{};
    std::string relay{};
};

}  // namespace link

class Link : public std::enable_shared_from_this<Link> {
  public:
    using Clock = link::Clock;

    struct Limits {
        // Connections to processes with which no group has messages live so long.
        std::chrono::milliseconds grace{60000};
        std::chrono::milliseconds greeting{5000};
        // A connection that messages wait for, and that gives no sign of life, lives so long.
        std::chrono::milliseconds silence{30000};
        // connect() looks so often whether the caller has given up, and at clocks of its own.
        std::chrono::milliseconds check{100};
    };

    // `listen`: host:port, with brackets around an IPv6 address; port 0 is any free one; "" does
    // not listen. `advertise`: where the others can dial this process; port 0 is the port that
    // listens; "": they cannot. `seed`: the private key of this process; without it all is plain.
    // `proxy`: makes all connections that this process dials.
    static std::shared_ptr<Link> open(const std::string& listen, const std::string& advertise,
                                      Limits limits,
                                      const std::optional<link::Seed>& seed = std::nullopt,
                                      const std::optional<link::Proxy>& proxy = std::nullopt);
    static std::shared_ptr<Link> open(const std::string& listen, const std::string& advertise) {
        return open(listen, advertise, Limits());
    }
    ~Link();
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    // The others need to know: host:port, and 128 random bits as hexadecimal digits.
    const std::string& address() const { return address_; }
    const std::string& nonce() const { return nonce_text_; }
    bool has_key() const { return identity_ != nullptr; }
    // Only where has_key().
    const link::PublicKey& public_key() const { return identity_->public_key(); }

    // Replaces the keys that may connect; at first there are none. Connections of other keys end.
    void allow(std::set<link::PublicKey> keys);

    // Connects the groups of a token, two for each lane: returns the channels to all peers by rank,
    // null for the own rank. `token` is the same on all members and was never used before. Returns
    // once every member has called it, else throws one sentence that names each rank that is not
    // connected at the limit. `check` is called again and again meanwhile, and may throw. Then
    // close_group() must be called for each group.
    std::vector<std::shared_ptr<link::Channel>> connect(
        const std::string& token, int rank, const std::vector<link::Place>& peers, int lanes,
        std::chrono::milliseconds limit, const std::function<void()>& check = [] {});

    // Sets the responder to requests of a name; null: none any more. Requests that nothing answers
    // get an answer without a head.
    void set_responder(const std::string& service,
                       const std::shared_ptr<link::Responder>& responder);
    void answer(const link::Request& request, std::vector<uint8_t> head, link::Body body);

    // Connects this process to others outside of groups, and keeps dialling until the next call for
    // this name, which has others. Returns at once: for each peer why it is not connected so far,
    // empty where it is. A call redials what has ended. A peer that cannot be dialled may dial.
    std::vector<std::string> reach(const std::string& service,
                                   const std::vector<link::Place>& peers);
    // Asks a process that is connected; returns the number of the request, 0 without a connection.
    // An answer with a longer body counts as none.
    uint32_t request(const link::Place& peer, const std::string& service,
                     const std::vector<uint8_t>& bytes, uint64_t most_bytes);
    // Waits for the first answer of this name, then returns all that have come.
    std::vector<link::Reply> replies(const std::string& service, std::chrono::milliseconds timeout);
    // Bytes that have come so far of the bodies of open requests.
    uint64_t arrived(const std::vector<uint32_t>& tickets) const;
    // No answer is wanted any more.
    void forget(const std::vector<uint32_t>& tickets);

    // Says to the others, in its next beats, how far this process is. From any thread; waits for
    // nothing.
    void set_progress(uint64_t inner_step, link::Phase phase);
    // The life of each process that a group has, or that reach() has asked for.
    std::vector<link::PeerLife> life() const;

    // Sends a message of at most 64 KiB, ahead of all bulk; false without a connection, or where a
    // MiB of messages waits for that process. Messages over one connection keep their order, and
    // are lost with the connection.
    bool tell(const std::string& nonce, const std::string& service,
              const std::vector<uint8_t>& bytes);
    // Waits for the first message of this name, then returns all: who has sent it, and its bytes.
    // Messages that have come before the first call are lost; so are the oldest messages of a
    // process that has a MiB of them waiting here.
    std::vector<std::pair<std::string, std::vector<uint8_t>>> told(
        const std::string& service, std::chrono::milliseconds timeout);

    // Takes a connection that a process has dialled elsewhere for this one: at a relay.
    void adopt(Descriptor fd);

    // Ends all works and connections. Messages that are written already still arrive.
    void close();

    // "rtt_us": the longest round trip, and "retransmits": all that TCP has sent again.
    std::map<std::string, int64_t> counters() const;
    // By lane; empty where this process knows none of the nonce.
    std::vector<link::LaneFacts> lanes(const std::string& nonce) const;

    // False in a forked child, where the link's thread does not exist and its descriptors are
    // closed.
    bool is_own_process() const;
    void check_process() const;

    // For groups and their works.
    void post(link::Channel& channel, const link::MessagePtr& message);
    bool wait(const link::MessagePtr& message, std::chrono::milliseconds timeout);
    bool is_done(const link::Message& message) const;
    // After the return nobody touches the message's memory.
    void cancel(const link::MessagePtr& message);
    void close_group(int number, const std::vector<std::shared_ptr<link::Channel>>& channels);

  private:
    using Lock = std::unique_lock<std::mutex>;
    using ConnectionPtr = link::ConnectionPtr;
    using PeerPtr = std::shared_ptr<link::Peer>;
    using Channel = link::Channel;
    using ChannelPtr = std::shared_ptr<Channel>;

    // A call of connect().
    struct Call {
        uint64_t token = 0;
        int lanes = 0;
        Clock::time_point begin{}, deadline{}, next_look_up{};
        std::vector<link::PeerId> ids{};  // by rank
        std::vector<PeerPtr> peers{};     // null for the own rank
        std::vector<ChannelPtr> channels{};
        std::vector<std::string> addresses{};
        std::vector<std::pair<std::string, std::string>> targets{};  // whom this process dials
        std::vector<std::vector<Address>> found{};                   // there, or the proxy's
        std::vector<bool> are_relayed{};  // no address of this pair can be dialled
    };

    Link(const std::string& listen, const std::string& advertise, Limits limits,
         const std::optional<link::Seed>& seed, const std::optional<link::Proxy>& proxy);

    // link.cpp: the thread, and bytes.
    void loop();
    int next_timeout(Clock::time_point now) const;
    void handle_event(Lock& lock, uint64_t id, uint32_t events);
    void pass(Lock& lock);
    void serve(Lock& lock, const ConnectionPtr& connection);
    void flush(Lock& lock, const ConnectionPtr& connection, bool with_bulk);
    void flush_peer(Lock& lock, link::Peer& peer);
    void read(Lock& lock, const ConnectionPtr& connection);
    void parse(Lock& lock, const ConnectionPtr& connection);
    void begin_frame(Lock& lock, const ConnectionPtr& connection);
    // Asks for a sign of life.
    void ping(const ConnectionPtr& connection);
    void on_frame(Lock& lock, const ConnectionPtr& connection, const link::Frame& frame,
                  const uint8_t* payload);
    void end_payload(const ConnectionPtr& connection);
    ChannelPtr channel_of(link::Peer& peer, const link::Frame& frame);
    void mark_ready(const ConnectionPtr& connection);
    void wake();
    // Lets connect() look again.
    void announce();
    void end(Lock& lock, const link::MessagePtr& message, const std::string& error,
             bool is_aborted = false);
    void end_all(Lock& lock, Channel& channel, int number, const std::string& error);
    static bool is_connected(const link::Peer& peer);
    void lose(Lock& lock, link::Peer& peer, const std::string& text);
    void disconnect(Lock& lock, const ConnectionPtr& connection, const std::string& text);
    void forget_channel(link::Peer& peer, uint64_t token);
    void linger(Lock& lock);
    std::vector<ConnectionPtr> open_connections() const;

    // copies.cpp: requests and answers outside of groups.
    void on_request(const ConnectionPtr& connection, const link::Frame& frame,
                    const uint8_t* payload);
    void put_answer(const ConnectionPtr& connection, uint32_t ticket, std::vector<uint8_t> head,
                    link::Body body);
    bool may_copy(Clock::time_point now);
    void resume_copies(Clock::time_point now);
    PeerPtr reached_peer(const link::PeerId& id, const std::string& address);
    std::vector<Address> known_addresses(const link::PeerId& id,
                                         const std::pair<std::string, std::string>& target);
    static ConnectionPtr way_to(const link::Peer& peer);
    link::Inquiry* inquiry_of(const ConnectionPtr& connection, const link::Frame& frame);
    void on_reply(const ConnectionPtr& connection, const link::Frame& frame,
                  const uint8_t* payload);
    void on_copy(const ConnectionPtr& connection, const link::Frame& frame);
    void end_inquiry(uint32_t ticket);
    bool is_reached(const link::PeerId& id) const;
    void lose_inquiries(uint64_t connection_id);

    // life.cpp: signs of life, and messages.
    bool is_wanted(const link::Peer& peer) const;
    void beat(Lock& lock, Clock::time_point now);
    void redial(const PeerPtr& peer);
    bool is_direct(const link::Dial& dial) const;
    void on_tell(const ConnectionPtr& connection, const link::Frame& frame);
    void end_tell(link::Peer& peer, const link::Message& message);
    template <class Wants>
    void drop_told(link::Peer& peer, Wants wants);
    void forget_told(link::Peer& peer);

    // greeting.cpp: strangers, greetings and dials.
    ConnectionPtr add_connection(Descriptor fd, link::Connection::State state);
    void accept_some(Lock& lock);
    void add_stranger(Lock& lock, Descriptor fd);
    void end_a_stranger(Lock& lock);
    void pause_accepting();
    void greet(Lock& lock, const ConnectionPtr& connection);
    void on_hello(Lock& lock, const ConnectionPtr& connection);
    void on_answer(Lock& lock, const ConnectionPtr& connection);
    void refuse_stranger(Lock& lock, const ConnectionPtr& connection, const std::string& why = "");
    void refuse(Lock& lock, const ConnectionPtr& connection, const std::string& why);
    void answer_tls(const ConnectionPtr& connection);
    bool is_other_key(const link::PeerId& id) const;
    void settle(Lock& lock, const ConnectionPtr& connection, bool is_own);
    void start(const std::shared_ptr<link::Dial>& dial);
    void finish_connect(Lock& lock, const ConnectionPtr& connection);
    void ask_proxy(Lock& lock, const ConnectionPtr& connection);
    bool may_dial(Clock::time_point now) const;
    void begin_dialled(Lock& lock, const ConnectionPtr& connection);
    std::string unreachable(const std::string& why) const;
    std::string silent(const link::Connection& connection) const;
    std::string trouble_of(const link::Dial& dial) const;
    void ask(Lock& lock, const ConnectionPtr& connection);
    void dial_failed(link::Dial& dial, const std::string& trouble);
    void stop_dial(Lock& lock, link::Lane& lane);
    void run_timers(Lock& lock, Clock::time_point now);
    void check_life(Lock& lock, const ConnectionPtr& connection, Clock::time_point now);
    void sweep(Lock& lock, Clock::time_point now);
    PeerPtr peer_of(const link::PeerId& id, const std::string& name);

    // handshake.cpp: keys.
    void shake_hands();
    void shake(Lock& lock, const ConnectionPtr& connection);
    void secure(Lock& lock, const ConnectionPtr& connection);
    bool hear(Lock& lock, const ConnectionPtr& connection);
    void on_secure(Lock& lock, const ConnectionPtr& connection);
    void queue_shake(const ConnectionPtr& connection);
    void end_removed_keys(Lock& lock);
    void refuse_removed(Lock& lock, const ConnectionPtr& connection);

    // connect.cpp
    Call begin_call(const std::string& token, int rank, const std::vector<link::Place>& peers,
                    int lanes, std::chrono::milliseconds limit);
    std::vector<Address> addresses_of(const std::pair<std::string, std::string>& target) const;
    void look_up_missing(Call& call) const;
    link::PublicKey key_of(const std::string& name, bool is_own, const std::string& text) const;
    link::PeerId peer_id_of(const std::string& name, const link::Place& place,
                            bool is_own = false) const;
    void end_other_keys(Lock& lock, const Call& call);
    void enter(Lock& lock, Call& call);
    bool are_connected(Lock& lock, Call& call, bool is_asking);
    bool has_answered(Lock& lock, const Call& call, const ConnectionPtr& connection);
    bool connect_lane(Lock& lock, Call& call, size_t rank, int lane, bool is_asking);
    std::string missing(const Call& call) const;
    std::string missing_rank(const Call& call, size_t rank) const;
    void give_up(Lock& lock, Call& call);

    Limits limits_;
    pid_t pid_;
    link::Nonce nonce_{};
    std::string nonce_text_;
    std::string address_;
    std::shared_ptr<link::Identity> identity_;  // null: all is plain
    const std::optional<link::Proxy> proxy_;
    const std::shared_ptr<link::Keyring> allowed_ = std::make_shared<link::Keyring>();
    Descriptor epoll_, wakeup_, listener_;

    std::mutex call_mutex_;   // connect() runs once at a time
    std::mutex close_mutex_;  // and close()
    mutable std::mutex mutex_;
    std::condition_variable changed_;  // for connect()
    uint64_t num_changes_ = 0;         // calls of announce()
    std::condition_variable io_done_;  // for cancel()
    int num_cancelling_ = 0;
    bool is_closing_ = false;
    bool is_woken_ = false;
    uint64_t last_id_ = 1;
    std::unordered_map<uint64_t, ConnectionPtr> connections_;
    std::deque<ConnectionPtr> ready_;
    link::Strangers strangers_;  // that have not greeted yet
    const size_t most_strangers_ = link::most_strangers();
    link::Reserve reserve_;
    std::map<link::PeerId, PeerPtr> peers_;
    std::condition_variable shake_due_;  // for the thread for handshakes
    std::deque<ConnectionPtr> shakes_;   // own dials before strangers
    bool has_new_keys_ = false;
    std::string last_refusal_;  // why a connection that came was refused
    Clock::time_point refused_at_{};
    std::vector<std::shared_ptr<link::Dial>> dials_;
    bool has_proxy_answered_ = false;  // in this call
    std::deque<uint64_t> closed_tokens_;
    Clock::time_point accept_at_{};  // no descriptor was left: accept again then
    bool is_accepting_ = true;
    Clock::time_point next_sweep_{};
    std::vector<uint8_t> scratch_;  // what nobody wants is read into it

    std::map<uint64_t, std::weak_ptr<link::Responder>> responders_;  // by the hash of the name
    std::map<link::PeerId, Clock::time_point> unknown_hosts_;        // when to look them up again
    std::map<uint64_t, std::set<link::PeerId>> reached_;             // by the same
    std::map<uint64_t, std::vector<link::Reply>> replies_;           // by the same
    std::map<uint32_t, link::Inquiry> inquiries_;                    // by ticket
    std::condition_variable replied_;
    uint32_t last_ticket_ = 0;
    link::CopyShare share_;
    bool is_copying_ = false;  // copies wait on some connection

    std::atomic<uint64_t> progress_{0};  // inner step and phase
    link::OwnClock own_clock_{Clock::now()};
    Clock::time_point next_beat_{};
    uint32_t num_beats_ = 0;
    std::map<uint64_t, size_t> num_told_;  // messages that wait, by the hashes of known names

    int64_t num_strangers_ = 0;
    int64_t num_dropped_ = 0;
    int64_t num_connects_ = 0;
    int64_t num_sent_again_ = 0;  // segments, over connections that have ended
    int64_t sent_bytes_ = 0;
    int64_t received_bytes_ = 0;
    std::thread thread_;
    std::thread shake_thread_;  // of a link with keys: a handshake takes the time of many messages
};

}  // namespace diloco
