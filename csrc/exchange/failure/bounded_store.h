// A store whose calls end: a call that the store's host does not answer in time fails.
//
// TCPStore waits for ever for a host that hangs without dying, also where it takes a timeout, and
// holds its mutex meanwhile. Every call runs on a thread of its own; the thread of an unanswered
// call is left behind, with the data it needs, until the host answers or dies. Until then later
// calls fail at once. A connection that has broken stays broken, since a TCPStore never connects
// again: after the first c10::DistNetworkError every call fails at once, and torch prints no
// further trace.
//
// A wait for keys asks for them again and again. TCPStore's own wait holds the mutex until the keys
// are there, and no other thread can set a key meanwhile: two processes that wait for each other in
// several threads would wait in vain.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace diloco {

// Connects to the TCPStore at an address; the client's waits have this timeout, too. Throws
// c10::DistError when no store answers in time.
c10::intrusive_ptr<c10d::Store> connect_store(const std::string& host, uint16_t port,
                                              std::chrono::milliseconds timeout);

// The store with calls that end within `limit`: a BoundedStore, unless the store's own calls end.
c10::intrusive_ptr<c10d::Store> bounded(c10::intrusive_ptr<c10d::Store> store,
                                        std::chrono::milliseconds limit);
// A further connection to the same host, below the same prefixes.
c10::intrusive_ptr<c10d::Store> another_connection(c10d::Store& store);
// Whether the connection of a bounded store has broken, and nobody listens any more.
bool is_lost(c10d::Store& store);

class BoundedStore : public c10d::Store {
  public:
    using Bytes = std::vector<uint8_t>;
    using milliseconds = std::chrono::milliseconds;
    using c10d::Store::compareSet;
    using c10d::Store::set;

    // `limit`: of every call; a wait for keys is many calls. Calls throw c10::DistStoreError past
    // the limit, c10::DistNetworkError once the connection has broken, and the exceptions of
    // `store`.
    BoundedStore(c10::intrusive_ptr<c10d::Store> store, milliseconds limit);

    // Connects within the store's own timeout: torch asks a name server, which may take seconds. A
    // function of c10d::Store from torch 2.8 on, therefore without `override`.
    c10::intrusive_ptr<Store> clone();
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
    bool hasExtendedApi() const override { return store_->hasExtendedApi(); }
    // A function of c10d::Store in newer versions of torch; else there is no list.
    std::vector<std::string> listKeys();

    // Whether the connection has broken; from any thread.
    bool is_broken() const { return *is_broken_; }

  private:
    void ask(std::chrono::milliseconds limit, std::function<void(Store&)> body) const;
    void run(std::function<void(Store&)> body) const;
    template <typename Body>
    auto call(Body body) const;

    c10::intrusive_ptr<Store> store_;
    milliseconds limit_;
    // Both outlive this object in the threads left behind.
    std::shared_ptr<std::atomic<bool>> is_broken_;
    std::shared_ptr<std::atomic<int>> num_unanswered_;
};

}  // namespace diloco
