// The host of stores with keys: holds the values, and lets in clients with an allowed key.
//
// This process reads and writes the values directly. Each client has a thread here, which mostly
// waits for the client's next request.
#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unordered_map>
#include <vector>

#include "exchange/link/link.h"
#include "exchange/store/keyed_socket.h"

namespace diloco::store {

// The values by key. Threads share it.
class Table {
  public:
    using Keys = std::vector<std::string>;

    // Writes pairs of key and value.
    void set(const Keys& pairs);
    // As TCPStore does: a missing key counts as an empty value, and stays missing where something
    // was expected, which is then returned.
    std::string compare_set(const std::string& key, const std::string& expected,
                            const std::string& desired);
    // Throws std::invalid_argument where the value is no number.
    int64_t add(const std::string& key, int64_t amount);
    void append(const std::string& key, const std::string& value);
    bool remove(const std::string& key);
    bool has(const Keys& keys) const;
    Keys list() const;
    // Returns the values once all are there; null when `end` has passed or `is_over` returns true,
    // which is asked for now and then.
    std::optional<Keys> wait(
        const Keys& keys, Clock::time_point end,
        const std::function<bool()>& is_over = [] { return false; });
    // Makes waits ask `is_over` now.
    void wake() { changed_.notify_all(); }

  private:
    bool has_all(const Keys& keys) const;

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::unordered_map<std::string, std::string> values_;
};

}  // namespace diloco::store

namespace diloco {

class StoreHost : public c10d::Store {
  public:
    using Bytes = std::vector<uint8_t>;
    using milliseconds = std::chrono::milliseconds;
    using c10d::Store::compareSet;
    using c10d::Store::set;

    // `listener`: a socket that listens. `allowed`: the keys that are let in beside the own one.
    // `timeout`: of this process's own waits.
    StoreHost(Descriptor listener, std::shared_ptr<link::Identity> identity,
              std::set<link::PublicKey> allowed, milliseconds timeout);
    ~StoreHost() override;

    // Replaces the keys that are let in; connections of other keys end.
    void allow(std::set<link::PublicKey> keys);
    // Ends all connections; idempotent.
    void close();
    // Clients that have shown their keys.
    int64_t num_clients() const;

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
    // The threads of the clients share this, so that a thread that ends late still finds it there.
    struct Shared;
    struct Client;

    static void accept_all(const std::shared_ptr<Shared>& shared);
    static void serve(const std::shared_ptr<Shared>& shared, int id, Descriptor fd);
    static store::Packet answer(Shared& shared, store::KeyedSocket& socket,
                                const store::Packet& request);

    std::vector<std::string> wait_for(const std::vector<std::string>& keys, milliseconds timeout);

    const std::shared_ptr<Shared> shared_;
    const pid_t process_ = getpid();
    std::mutex closing_;
    std::thread thread_;
};

}  // namespace diloco
