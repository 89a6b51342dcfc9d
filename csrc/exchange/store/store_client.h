// The client of a store's host, with keys or without.
//
// With keys, both sides prove their ed25519 keys as the two ends of a link do, and each side
// decides by the key of the other. A router may forget a connection, and a host may be started
// again: a call then dials anew, and asks again, within its limit. The host does nothing twice.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "exchange/link/proxy.h"
#include "exchange/store/table.h"

namespace diloco {

class StoreClient : public store::Values {
  public:
    // Where the host is, the keys that it may have, and the proxy that leads to the host.
    struct Place {
        std::string host;
        uint16_t port = 0;
        std::shared_ptr<link::Identity> identity{};  // null: without keys
        std::set<link::PublicKey> allowed{};
        std::optional<link::Proxy> proxy{};
    };
    // The host that answered last has said this of itself.
    struct Facts {
        std::string table_id{}, process{};
        bool is_durable = false;
        bool is_refused = false;  // the last dial has failed because of a key
        bool takes_posts = false;
    };
    using Record = std::pair<std::string, uint64_t>;            // bytes and revision
    using Beat = std::tuple<std::string, std::string, double>;  // member, text, age in seconds
    // A look at the record and at the beats of a run.
    struct Look {
        uint64_t version = 0, revision = 0;
        std::string record{};  // empty where the client knows this revision
        bool is_whole = true;  // `beats` has all, and not only what has changed
        std::string counts{};  // the last byte of the number of beats of each member, by name
        std::vector<Beat> beats{};
    };

    // `timeout`: of waits. With `connects` it tries until then where nobody listens, and for a
    // while where the host does not answer; else the first call dials. `table_id`: the table that
    // must answer; empty: the first that does. Throws c10::DistStoreError with one sentence.
    StoreClient(Place place, milliseconds timeout, const std::string& table_id = "",
                bool connects = true);

    // A further connection, that the first call makes, to the table `id`; empty: to this table.
    c10::intrusive_ptr<StoreClient> another(const std::string& id);
    // A further connection. A function of c10d::Store from torch 2.8 on, so without `override`.
    c10::intrusive_ptr<c10d::Store> clone();

    // All calls throw c10::DistStoreError where the host refuses or does not answer in time, or a
    // key does not come in time, and c10::DistNetworkError where nobody listens at the address, or
    // another table answers.

    // The record and the beats of a run. A swap whose answer is lost has an unknown outcome, and
    // throws.
    Record read_record(const std::string& run, milliseconds limit);
    bool swap_record(const std::string& run, const std::string& old, const std::string& next,
                     milliseconds limit);
    std::vector<Beat> beat(const std::string& run, const std::string& member,
                           const std::string& text, milliseconds limit);
    // Beats and reads at once. `version` and `revision`: of the last look; 0: there was none.
    Look look(const std::string& run, const std::string& member, const std::string& text,
              uint64_t version, uint64_t revision, milliseconds limit);
    // Sends a text of a member to a host that takes posts, over the connection that there is, and
    // waits for no answer; an empty text takes the last one back. Returns whether a text has left.
    bool post(const std::string& run, const std::string& member, const std::string& text);
    // Returns once the revision is another one, or the time has passed.
    Record watch_record(const std::string& run, uint64_t revision, milliseconds time);

    const std::string& host() const { return wire_->place.host; }
    uint16_t port() const { return wire_->place.port; }
    std::string table_id() const;
    Facts facts() const;

  private:
    struct Wire {
        Place place;
        const pid_t owner = getpid();
        // The caller that has the turn uses these. No std::timed_mutex: ThreadSanitizer does not
        // see how that is locked.
        std::unique_ptr<store::Channel> channel{};  // null: the next call dials
        std::optional<Address> address{};           // of the last connection
        std::string name = store::random_name();
        int64_t last_number = 0;
        std::mutex mutex{};
        std::condition_variable turn_ends{};
        // Under the mutex.
        bool has_turn = false;
        std::string table_id{};
        Facts facts{};
        std::string process{};  // that has this client's keys
    };
    struct Question {
        store::Request request{};
        std::vector<std::string> parts{};
        int64_t number = 0;
    };

    void connect(store::Clock::time_point end, store::Clock::time_point refused_end);
    Descriptor dial_host(store::Clock::time_point end, std::string& trouble);
    std::string greet(Descriptor fd, store::Clock::time_point end);
    void take_facts(const store::Packet& hello);
    [[noreturn]] void give_up(const std::string& why);
    [[noreturn]] void lose(const std::string& why);
    std::string name_of_host() const;
    void check_memory();
    // Waits for the turn until `end`; the result gives the turn back, and is null where it is late.
    std::shared_ptr<void> take_turn(store::Clock::time_point end);

    store::Packet ask(Question question, milliseconds limit);
    store::Packet ask(store::Request request, store::Keys parts, int64_t number) override {
        return ask({request, std::move(parts), number}, own_limit());
    }
    // Asks for what the host waits for, until it is there or the time has passed.
    template <typename IsThere>
    store::Packet ask_until(Question question, milliseconds time, IsThere is_there);
    store::Packet wait_for(store::Request request, const store::Keys& keys,
                           milliseconds time) override;
    milliseconds own_limit() const { return std::max(timeout_, kLeast); }

    // Nothing but the way to the host makes a call wait, whatever the timeout of waits is.
    static constexpr milliseconds kLeast{10000};

    const std::shared_ptr<Wire> wire_;
};

}  // namespace diloco
