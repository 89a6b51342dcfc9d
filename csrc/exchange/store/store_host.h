// The host of a store: holds values, records, beats and posts (see table.h), and serves clients.
//
// With keys, connections are encrypted, and only clients with an allowed key are served; without
// keys all clients are. The host's own process uses the values directly, without a connection. One
// thread serves all clients.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "exchange/link/tls.h"
#include "exchange/store/table.h"

namespace diloco {

class StoreHost : public store::Values {
  public:
    using PublicKeys = std::set<link::PublicKey>;

    struct Options {
        Descriptor listener{};                       // a socket that listens
        std::shared_ptr<link::Identity> identity{};  // null: without keys
        PublicKeys allowed{};                        // keys of clients, beside the own key
        milliseconds timeout{};                      // limit of waits by this process itself
        std::string table_id{};                      // empty: a random id
        bool is_journalled = false;                  // swaps wait for settle(), see Records
        std::map<std::string, std::string> records{};
        milliseconds drop_after{};  // the age at which a beat or a post is dropped
    };
    // The number of open connections, and sums since the host began.
    struct Facts {
        int64_t connections = 0, requests = 0, received_bytes = 0, sent_bytes = 0,
                refused_posts = 0;
    };

    explicit StoreHost(Options options);
    ~StoreHost() override;

    // Replaces the allowed keys, and closes connections of other keys. Clients whose key is only in
    // `readers` may read, and change nothing.
    void allow(PublicKeys keys, PublicKeys readers);
    // Ends all connections; idempotent.
    void close();
    // The number of connected clients, without strangers.
    int64_t num_clients() const;
    const std::string& table_id() const;

    // The last beats and posts of all members, and the records of all runs. Any thread may call.
    std::vector<store::Beats::Last> beats() const;
    std::vector<store::Beats::Last> posted() const;
    std::map<std::string, std::string> all_records() const;
    Facts facts() const;
    // Keeps a post of a member that runs in this process. Throws std::invalid_argument if it does
    // not fit.
    void post(const std::string& run, const std::string& member, const std::string& text);

    // For the thread that writes the journal; see Records::take() and Records::settle().
    std::vector<store::Change> take_changes(milliseconds time);
    void settle(const std::string& sentence, bool is_doubtful);

    c10::intrusive_ptr<c10d::Store> clone();

  private:
    class Server;

    void check_process() const;
    store::Packet ask(store::Request request, store::Keys parts, int64_t number) override;
    store::Packet wait_for(store::Request request, const store::Keys& keys,
                           milliseconds time) override;

    const std::shared_ptr<Server> server_;
    const pid_t process_ = getpid();
    std::mutex closing_;
    std::thread thread_;
};

}  // namespace diloco
