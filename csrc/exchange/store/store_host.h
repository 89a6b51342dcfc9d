// The host of stores: holds the values, records, beats and posts, and lets in clients.
//
// With keys, connections are encrypted, and clients with an allowed key are let in; without keys
// everybody is. This process reads and writes the values directly. One thread serves all clients.
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
        PublicKeys allowed{};                        // beside the own key
        milliseconds timeout{};                      // of this process's own waits
        std::string table_id{};                      // empty: a random one
        bool is_journalled = false;                  // swaps wait for settle()
        std::map<std::string, std::string> records{};
        milliseconds drop_after{};  // the age at which a beat or a post is dropped
    };
    // Sums since the host began, but for the connections, which are open now.
    struct Facts {
        int64_t connections = 0, requests = 0, received_bytes = 0, sent_bytes = 0,
                refused_posts = 0;
    };

    explicit StoreHost(Options options);
    ~StoreHost() override;

    // Replaces the keys that are let in; connections of other keys end. Clients with a key of
    // `readers` alone change nothing.
    void allow(PublicKeys keys, PublicKeys readers);
    // Ends all connections; idempotent.
    void close();
    // Clients that were let in.
    int64_t num_clients() const;
    const std::string& table_id() const;

    // The last texts of all members, and the records of all runs; from any thread.
    std::vector<store::Beats::Last> beats() const;
    std::vector<store::Beats::Last> posted() const;
    std::map<std::string, std::string> all_records() const;
    Facts facts() const;
    // Keeps a text of a member of this process. Throws std::invalid_argument for what does not fit.
    void post(const std::string& run, const std::string& member, const std::string& text);

    // For the thread of the journal, see store::Records.
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
