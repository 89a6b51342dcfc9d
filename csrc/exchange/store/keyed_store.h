// A store whose connections are encrypted, and which asks for a key: the client.
//
// The other side is a StoreHost. Both prove their ed25519 keys as the two ends of a link do, and
// each side decides by the key of the other. Requests and answers are packets.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "exchange/link/proxy.h"
#include "exchange/store/keyed_socket.h"

namespace diloco {

class KeyedStore : public c10d::Store {
  public:
    using Bytes = std::vector<uint8_t>;
    using milliseconds = std::chrono::milliseconds;
    using c10d::Store::compareSet;
    using c10d::Store::set;

    // Where the host is, the keys that it may have, and the proxy that leads to the host.
    struct Place {
        std::string host;
        uint16_t port = 0;
        std::shared_ptr<link::Identity> identity{};
        std::set<link::PublicKey> allowed{};
        std::optional<link::Proxy> proxy{};
    };

    // Tries again until `timeout` where nobody listens, and for a while where the host does not
    // answer; the client's waits have this timeout, too. Throws c10::DistStoreError with one
    // sentence.
    KeyedStore(Place place, milliseconds timeout);

    // A further connection. A function of c10d::Store from torch 2.8 on, so without `override`.
    c10::intrusive_ptr<c10d::Store> clone();
    // All throw c10::DistNetworkError once the connection has broken, and c10::DistStoreError where
    // a key does not come in time.
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
    // A function of c10d::Store in newer versions of torch.
    std::vector<std::string> listKeys();

    const std::string& host() const { return place_.host; }
    uint16_t port() const { return place_.port; }

  private:
    static constexpr milliseconds kLeast{10000};

    void connect();
    Descriptor dial_host(store::Clock::time_point end, std::string& trouble) const;
    std::string greet(Descriptor fd, store::Clock::time_point end);
    [[noreturn]] void give_up(const std::string& why) const;
    store::Packet ask(store::Request request, std::vector<std::string> parts, int64_t number,
                      milliseconds limit);
    store::Packet ask(store::Request request, std::vector<std::string> parts, int64_t number = 0) {
        // Nothing but the way to the host makes these wait, whatever the timeout of waits is.
        return ask(request, std::move(parts), number, std::max(timeout_, kLeast));
    }
    std::vector<std::string> get_all(const std::vector<std::string>& keys);

    const Place place_;
    std::mutex mutex_;
    std::unique_ptr<store::KeyedSocket> socket_;  // null once the connection has broken
};

}  // namespace diloco
