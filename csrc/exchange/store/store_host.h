// The host of stores: holds the values, records and beats, and lets in clients.
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
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "exchange/link/tls.h"
#include "exchange/store/table.h"

namespace diloco {

class StoreHost : public c10d::Store {
  public:
    using Bytes = std::vector<uint8_t>;
    using milliseconds = std::chrono::milliseconds;
    using PublicKeys = std::set<link::PublicKey>;
    using c10d::Store::compareSet;
    using c10d::Store::set;

    struct Options {
        Descriptor listener{};                       // a socket that listens
        std::shared_ptr<link::Identity> identity{};  // null: without keys
        PublicKeys allowed{};                        // beside the own key
        milliseconds timeout{};                      // of this process's own waits
        std::string table_id{};                      // empty: a random one
        bool is_journalled = false;                  // swaps wait for settle()
        std::map<std::string, std::string> records{};
        milliseconds drop_after{};  // the age at which a beat is dropped
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

    // For the thread of the journal, see store::Records.
    std::vector<store::Change> take_changes(milliseconds time);
    void settle(const std::string& sentence, bool is_doubtful);

    c10::intrusive_ptr<c10d::Store> clone();
    void set(const std::string& key, const Bytes& value) override;
    Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override;
    Bytes get(const std::string& key) override;
    int64_t add(const std::string& key, int64_t value) override;
    bool deleteKey(const std::string& key) override;
    bool check(const std::vector<std::string>& keys) override;
    int64_t getNumKeys() override;
    void wait(const std::vector<std::string>& keys) override;
    void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override;
    void append(const std::string& key, const Bytes& value) override;
    std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override;
    void multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) override;
    bool hasExtendedApi() const override { return true; }
    std::vector<std::string> listKeys();

  private:
    class Server;

    store::Keys wait_for(const store::Keys& keys, milliseconds timeout);

    const std::shared_ptr<Server> server_;
    const pid_t process_ = getpid();
    std::mutex closing_;
    std::thread thread_;
};

}  // namespace diloco
