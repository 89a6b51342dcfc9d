// The thread of a store's host: one epoll loop for all clients.
#pragma once

#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "exchange/link/link.h"
#include "exchange/link/strangers.h"
#include "exchange/store/store_host.h"

namespace diloco {

class StoreHost::Server {
  public:
    explicit Server(Options options);

    // Until stop().
    void run();
    void stop();
    void poke();
    void allow(PublicKeys keys, PublicKeys readers);
    int64_t num_clients() const { return num_clients_; }

    const std::string table_id;
    store::Table table;
    store::Records records;

  private:
    using Clock = store::Clock;
    using Packet = store::Packet;
    using Keys = store::Keys;

    enum class Stage {
        kShaking,
        kReading,  // the next request
        kWaiting,  // the client waits for keys, a record or the journal
        kWriting,  // the answer
        kEnded,
    };

    struct Client {
        Client(int id, std::unique_ptr<store::Channel> channel)
            : id(id), channel(std::move(channel)) {}

        const int id;
        const std::unique_ptr<store::Channel> channel;
        Stage stage = Stage::kShaking;
        bool has_spoken = false;
        bool is_stranger = true;  // until its hello
        std::string name{};       // that it gives itself
        uint32_t events = 0;      // that epoll looks for
        Clock::time_point deadline = Clock::time_point::max();
        store::Incoming in{};
        store::Outgoing out{};
        size_t held = 0;  // bytes, as counted in held_

        // What it waits for: keys, of which one is watched, or another revision of a run's record.
        Keys keys{};
        bool wants_values = false;
        std::string watched{};
        std::string run{};
        uint64_t revision = 0;
    };
    using Waiting = std::unordered_map<std::string, std::set<int>>;

    // The last answer to a client that changes values.
    struct Remembered {
        int64_t number = 0;
        Packet answer{};
        std::list<std::string>::iterator turn{};
    };

    void accept_all();
    void admit(Descriptor fd);
    void end_a_stranger();
    // While no descriptor is left, callers wait in the kernel's queue.
    void be_deaf(bool is_deaf);
    void pump(Client& client);
    // Does one thing; returns whether there may be more to do.
    bool turn(Client& client);
    static bool speaks_alike(Client& client);
    void heard(Client& client);
    Packet answer(Client& client, Packet& request);
    Packet welcome(Client& client, const Packet& request);
    Packet change(Client& client, Packet& request);
    Packet changed(const Packet& request);
    void start_wait(Client& client, Packet& request);
    void start_watch(Client& client, const Packet& request);
    void swap(Client& client, const Packet& request);
    void reply(Client& client, const Packet& packet);
    void reply_values(Client& client);
    void reply_record(Client& client);
    void go_on(const Keys& fresh);
    void finish_swaps();
    void stop_waiting(Client& client);
    void end_late();
    void end_disallowed();
    void look_for(Client& client, uint32_t events);
    void set_deadline(Client& client, Clock::time_point deadline);
    void charge(Client& client);
    void end(Client& client);
    void remove_ended();
    int milliseconds_left() const;
    bool is_allowed(const link::PublicKey& key) const;
    bool may_only_read(const Client& client) const;

    const Descriptor listener_, epoll_, wake_;
    const std::shared_ptr<link::Identity> identity_;
    const std::string process_ = store::random_name();
    const pid_t owner_ = getpid();
    link::Keyring allowed_, readers_;
    std::atomic<bool> is_closing_ = false, is_new_allowed_ = false;
    std::atomic<int64_t> num_clients_ = 0;

    // The rest is the thread's.
    store::Beats beats_;
    int last_id_ = 0;
    std::map<int, std::unique_ptr<Client>> clients_;
    link::Strangers strangers_;
    std::set<int> ready_;  // with more to do than one turn
    std::vector<int> ended_;
    std::set<std::pair<Clock::time_point, int>> deadlines_;
    std::optional<Clock::time_point> deaf_until_;
    Waiting waiting_for_key_, waiting_for_record_;
    std::unordered_map<std::string, int> by_name_;
    std::unordered_map<std::string, Remembered> remembered_;
    std::list<std::string> turns_;  // the names in remembered_, the oldest first
    size_t held_ = 0;
};

}  // namespace diloco
