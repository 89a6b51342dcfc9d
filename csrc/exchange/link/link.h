// One TCP port for all messages of a process: the link to the other members of an exchange.
//
// A link has at most one listening socket, one thread (with a key a second one, for handshakes),
// and for each lane to a peer one or two connections. A connection belongs to the peer's process,
// known by its random nonce, and not to a group, so a change of the group opens connections to
// newcomers only. If both processes have an address, each dials the other, and sends over the
// connection that it dialled; a process that cannot dial sends over the connection that its peer
// dialled. Two processes that cannot be dialled both dial a relay, which copies bytes. A process
// with a proxy dials peers and relays through the proxy.
//
// A link with a key speaks TLS only: before the greeting each process proves that it holds an
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

// The attempts of this process to connect one lane to a peer. Each address is tried in turn.
struct Dial {
    std::shared_ptr<Peer> peer{};
    int lane = 0;
    std::vector<Address> addresses{};  // of the peer, of its relay, or of the proxy
    bool is_relayed = false;
    bool is_for_copies = false;
    bool is_redial = false;  // made only to learn whether the host refuses; other dials replace it
    std::pair<std::string, std::string> target{};  // host and port of the peer or its relay
    size_t next = 0;                               // index of the next address to try
    Clock::duration share{};                       // the longest time of one attempt
    Clock::time_point retry_at{};
    bool is_over = false;                  // there will be no further attempt
    std::chrono::milliseconds pause{100};  // after all addresses have failed
    ConnectionPtr connection{};            // of the present attempt; null between attempts
    std::string trouble{};                 // why the last attempt failed

    // When the present attempt began.
    Clock::time_point begin() const { return connection->deadline - share; }
};

// The public keys that may connect. Threads may use a keyring at the same time.
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
    TcpFacts tcp{};         // of the connection over which this process sends
};

// How other processes find a process.
struct Place {
    std::string nonce{};    // 32 hexadecimal digits
    std::string address{};  // "host:port", or "" if the process cannot be dialled
    std::string key{};      // the public key as 64 hexadecimal digits, or ""
    std::string relay{};    // "host:port" of the relay where a process without an address waits
};

}  // namespace link

class Link : public std::enable_shared_from_this<Link> {
  public:
    using Clock = link::Clock;

    struct Limits {
        // How long a connection to a process that no group needs stays open.
        std::chrono::milliseconds grace{60000};
        // How long a new connection may take for its greeting.
        std::chrono::milliseconds greeting{5000};
        // How long messages wait for a connection over which no byte comes, before it is closed.
        std::chrono::milliseconds silence{30000};
        // How often connect() calls `check` and looks at its deadline.
        std::chrono::milliseconds check{100};
    };

    // `listen` is "host:port" with brackets around an IPv6 address; port 0 takes any free port, and
    // with "" the link does not listen. `advertise` is the address at which others can dial this
    // process; port 0 means the listening port, and "" that others cannot. `seed` is the private
    // key of this process; without a seed there is no TLS. All dials go through `proxy`.
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

    // Other processes find this one by its address, "host:port" or "", and by its nonce, 128 random
    // bits as hexadecimal digits.
    const std::string& address() const { return address_; }
    const std::string& nonce() const { return nonce_text_; }
    bool has_key() const { return identity_ != nullptr; }
    // Call only if has_key().
    const link::PublicKey& public_key() const { return identity_->public_key(); }

    // Replaces the keys that may connect; at first there are none. Connections of other keys end.
    void allow(std::set<link::PublicKey> keys);

    // Makes 2 * lanes groups of the processes in `peers` (by rank), and returns this process's
    // channels by rank, null for its own. `token` is equal on all members and was never used
    // before. Returns once every member has called connect(); after `limit` it throws a sentence
    // that names each rank which is missing. `check` is called again and again meanwhile, and may
    // throw. After success, close_group() must be called for each group.
    std::vector<std::shared_ptr<link::Channel>> connect(
        const std::string& token, int rank, const std::vector<link::Place>& peers, int lanes,
        std::chrono::milliseconds limit, const std::function<void()>& check = [] {});

    // Sets the responder that answers requests to the service of this name, or removes it (null).
    // A request without a responder gets an answer with an empty head.
    void set_responder(const std::string& service,
                       const std::shared_ptr<link::Responder>& responder);
    void answer(const link::Request& request, std::vector<uint8_t> head, link::Body body);

    // Connects this process to `peers` outside of groups, on behalf of `service`. The link keeps
    // dialling until the next call for this service, which replaces the list. Returns at once: for
    // each peer the reason why it is not connected yet, or "". A call redials connections that have
    // ended. A peer that cannot be dialled may dial this process.
    std::vector<std::string> reach(const std::string& service,
                                   const std::vector<link::Place>& peers);
    // Sends a request to a connected process. Returns the request's number, its ticket, or 0
    // without a connection. If the answer's body has more than `most_bytes`, the reply is empty.
    uint32_t request(const link::Place& peer, const std::string& service,
                     const std::vector<uint8_t>& bytes, uint64_t most_bytes);
    // Waits, at most for `timeout`, until a reply to a request of this service is there, and
    // returns all such replies.
    std::vector<link::Reply> replies(const std::string& service, std::chrono::milliseconds timeout);
    // The number of bytes that have arrived so far of the bodies of these requests' answers.
    uint64_t arrived(const std::vector<uint32_t>& tickets) const;
    // Drops these requests: their answers are not wanted any more.
    void forget(const std::vector<uint32_t>& tickets);

    // Sets the progress of this process that its next beats tell the others. Any thread may call
    // it; it never waits.
    void set_progress(uint64_t inner_step, link::Phase phase);
    // The signs of life of each process that is in a group with this one or in a list of reach().
    std::vector<link::PeerLife> life() const;

    // Sends a message of at most 64 KiB to the process, ahead of payloads. Returns false without a
    // connection, or if 1 MiB of messages waits for that process already. Messages over one
    // connection keep their order, and are lost with the connection.
    bool tell(const std::string& nonce, const std::string& service,
              const std::vector<uint8_t>& bytes);
    // Waits, at most for `timeout`, until a message to this service is there, and returns all such
    // messages: the nonce of the sender and the bytes. Messages that arrive before the first call
    // are lost. At most 1 MiB of messages of one sender wait here (64 KiB if the sender is in no
    // group and no list of reach()); then the oldest are lost.
    std::vector<std::pair<std::string, std::vector<uint8_t>>> told(
        const std::string& service, std::chrono::milliseconds timeout);

    // Accepts a connection that another process has dialled to this one at a relay.
    void adopt(Descriptor fd);

    // Ends all messages and connections. Bytes that are with the kernel already still arrive.
    void close();

    // Counters by name. "rtt_us" is the longest TCP round trip of the open connections, and
    // "retransmits" the number of TCP segments sent again.
    std::map<std::string, int64_t> counters() const;
    // The connections to the process of this nonce, by lane; empty if the process is unknown.
    std::vector<link::LaneFacts> lanes(const std::string& nonce) const;

    // False in a forked child, where the link's thread does not exist and its descriptors are
    // closed.
    bool is_own_process() const;
    void check_process() const;

    // The functions below are for LinkGroup and its c10d works.
    void post(link::Channel& channel, const link::MessagePtr& message);
    bool wait(const link::MessagePtr& message, std::chrono::milliseconds timeout);
    bool is_done(const link::Message& message) const;
    // Cancels a message. After the return the link does not touch the message's memory.
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
        std::vector<std::pair<std::string, std::string>> targets{};  // host and port to dial
        std::vector<std::vector<Address>> found{};  // addresses of the target, or of the proxy
        std::vector<bool> are_relayed{};            // both processes of the pair dial a relay
    };

    Link(const std::string& listen, const std::string& advertise, Limits limits,
         const std::optional<link::Seed>& seed, const std::optional<link::Proxy>& proxy);

    // link.cpp: the link's thread, reading and writing.
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
    // Sends a kPing, which the peer's link answers.
    void ping(const ConnectionPtr& connection);
    void on_frame(Lock& lock, const ConnectionPtr& connection, const link::Frame& frame,
                  const uint8_t* payload);
    void end_payload(const ConnectionPtr& connection);
    ChannelPtr channel_of(link::Peer& peer, const link::Frame& frame);
    void mark_ready(const ConnectionPtr& connection);
    void wake();
    // Wakes connect(), which checks again whether all members are connected.
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
    std::shared_ptr<link::Identity> identity_;  // null: this link has no key, and uses no TLS
    const std::optional<link::Proxy> proxy_;
    const std::shared_ptr<link::Keyring> allowed_ = std::make_shared<link::Keyring>();
    Descriptor epoll_, wakeup_, listener_;

    std::mutex call_mutex_;   // connect() runs once at a time
    std::mutex close_mutex_;  // close() runs once at a time
    mutable std::mutex mutex_;
    std::condition_variable changed_;  // wakes connect()
    uint64_t num_changes_ = 0;         // calls of announce()
    std::condition_variable io_done_;  // wakes cancel()
    int num_cancelling_ = 0;
    bool is_closing_ = false;
    bool is_woken_ = false;
    uint64_t last_id_ = 1;
    std::unordered_map<uint64_t, ConnectionPtr> connections_;
    std::deque<ConnectionPtr> ready_;  // connections that may be read or written now
    link::Strangers strangers_;        // accepted connections that have not greeted yet
    const size_t most_strangers_ = link::most_strangers();
    link::Reserve reserve_;
    std::map<link::PeerId, PeerPtr> peers_;
    std::condition_variable shake_due_;  // wakes shake_thread_
    std::deque<ConnectionPtr> shakes_;   // waiting for shake_thread_; own dials before strangers
    bool has_new_keys_ = false;
    std::string last_refusal_;  // why a connection that came was refused
    Clock::time_point refused_at_{};
    std::vector<std::shared_ptr<link::Dial>> dials_;
    bool has_proxy_answered_ = false;  // since the present call of connect() began
    std::deque<uint64_t> closed_tokens_;
    Clock::time_point accept_at_{};  // when to accept again after no descriptor was left
    bool is_accepting_ = true;
    Clock::time_point next_sweep_{};
    std::vector<uint8_t> scratch_;  // payloads that nobody wants are read into it

    // Keys of type uint64_t, here and below, are hashes of a service's name.
    std::map<uint64_t, std::weak_ptr<link::Responder>> responders_;
    std::map<link::PeerId, Clock::time_point> unknown_hosts_;  // when to look them up again
    std::map<uint64_t, std::set<link::PeerId>> reached_;
    std::map<uint64_t, std::vector<link::Reply>> replies_;
    std::map<uint32_t, link::Inquiry> inquiries_;  // by ticket
    std::condition_variable replied_;
    uint32_t last_ticket_ = 0;
    link::CopyShare share_;
    bool is_copying_ = false;  // copies wait on some connection

    std::atomic<uint64_t> progress_{0};  // inner step and phase
    link::OwnClock own_clock_{Clock::now()};
    Clock::time_point next_beat_{};
    uint32_t num_beats_ = 0;
    // The number of waiting messages by the hash of the service's name, once told() has asked.
    std::map<uint64_t, size_t> num_told_;

    int64_t num_strangers_ = 0;
    int64_t num_dropped_ = 0;
    int64_t num_connects_ = 0;
    int64_t num_sent_again_ = 0;  // segments, over connections that have ended
    int64_t sent_bytes_ = 0;
    int64_t received_bytes_ = 0;
    std::thread thread_;
    // Runs the TLS handshakes of a link with a key: one takes as long as many messages.
    std::thread shake_thread_;
};

}  // namespace diloco
