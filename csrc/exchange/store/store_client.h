// The client of a store's host, with keys or without.
//
// With keys, both sides prove their ed25519 keys as the two ends of a link do, and each side
// decides by the key of the other. If the connection is lost, because a router has forgotten it or
// the host was started again, a call dials anew and repeats its request within its time limit. The
// host recognises a repeated request, and does not change values twice. A swap is not repeated.
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
    // Where and how to reach the host.
    struct Place {
        std::string host;
        uint16_t port = 0;
        std::shared_ptr<link::Identity> identity{};  // null: without keys
        std::set<link::PublicKey> allowed{};  // keys that the host may have, beside the own key
        std::optional<link::Proxy> proxy{};   // dials the host, if there is one
    };
    // The facts in the host's answer to kHello, and whether the last dial was refused.
    struct Facts {
        std::string table_id{}, process{};
        bool is_durable = false;   // swaps are written to a journal
        bool is_refused = false;   // the last dial has failed because of a key
        bool takes_posts = false;  // the host knows kPost
    };
    using Record = std::pair<std::string, uint64_t>;            // bytes and revision
    using Beat = std::tuple<std::string, std::string, double>;  // member, text, age in seconds
    // The record and the beats of a run at one time. `version` is the version of the beats, and
    // `revision` the revision of the record.
    struct Look {
        uint64_t version = 0, revision = 0;
        std::string record{};  // empty if the client knows this revision already
        bool is_whole = true;  // `beats` has the beats of all members, not only changed ones
        std::string counts{};  // one byte for each member, by name: its number of beats mod 256
        std::vector<Beat> beats{};
    };

    // `timeout` is the limit of waits. With `connects` the constructor dials: until `timeout` if
    // nobody listens, for at most 30 s if a host accepts but does not answer. Without, the first
    // call dials. `table_id` is the table that must answer; if empty, any table may. Throws
    // c10::DistStoreError with one sentence.
    StoreClient(Place place, milliseconds timeout, const std::string& table_id = "",
                bool connects = true);

    // Another client of the table `id`, or of this client's table if `id` is empty. It connects in
    // its first call.
    c10::intrusive_ptr<StoreClient> another(const std::string& id);
    // Another client of the same table, with its own connection. It overrides a function that
    // c10d::Store has from torch 2.8 on, so it cannot say `override`.
    c10::intrusive_ptr<c10d::Store> clone();

    // All calls throw c10::DistStoreError if the host refuses or does not answer in time, or a key
    // is not set in time, and c10::DistNetworkError if nobody listens at the address, or another
    // table answers.

    // Read and write the record and the beats of a run; see Request. If the answer to a swap is
    // lost, its outcome is unknown, and swap_record() throws.
    Record read_record(const std::string& run, milliseconds limit);
    bool swap_record(const std::string& run, const std::string& old, const std::string& next,
                     milliseconds limit);
    std::vector<Beat> beat(const std::string& run, const std::string& member,
                           const std::string& text, milliseconds limit);
    // Sends a beat and returns the record and beats, in one request. `version` and `revision` come
    // from the last look, or are 0 if there was none; only changes since then are returned.
    Look look(const std::string& run, const std::string& member, const std::string& text,
              uint64_t version, uint64_t revision, milliseconds limit);
    // Sends a text of a member (kPost) over the present connection, without waiting for an answer;
    // an empty text removes the last one. Returns whether it was sent: not if there is no
    // connection, or the host does not know kPost.
    bool post(const std::string& run, const std::string& member, const std::string& text);
    // Waits until the record has another revision than `revision`, or the time has passed, and
    // returns the record.
    Record watch_record(const std::string& run, uint64_t revision, milliseconds time);

    const std::string& host() const { return wire_->place.host; }
    uint16_t port() const { return wire_->place.port; }
    std::string table_id() const;
    Facts facts() const;

  private:
    struct Wire {
        Place place;
        const pid_t owner = getpid();
        // One caller at a time may use these members, after take_turn(). The turn is no
        // std::timed_mutex, because ThreadSanitizer does not understand one.
        std::unique_ptr<store::Channel> channel{};  // null: the next call dials
        std::optional<Address> address{};           // the host's address in the last connection
        std::string name = store::random_name();
        int64_t last_number = 0;
        std::mutex mutex{};
        std::condition_variable turn_ends{};
        // Guarded by the mutex.
        bool has_turn = false;  // some caller has the turn
        std::string table_id{};
        Facts facts{};
        std::string process{};  // the host's process when this client first used keys there
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
    // Waits until `end` for the right to use the connection. The destruction of the result gives it
    // back; the result is null if the time has passed.
    std::shared_ptr<void> take_turn(store::Clock::time_point end);

    store::Packet ask(Question question, milliseconds limit);
    store::Packet ask(store::Request request, store::Keys parts, int64_t number) override {
        return ask({request, std::move(parts), number}, own_limit());
    }
    // Repeats a request with which the host waits for something, until `is_there` accepts the
    // answer or the time has passed.
    template <typename IsThere>
    store::Packet ask_until(Question question, milliseconds time, IsThere is_there);
    store::Packet wait_for(store::Request request, const store::Keys& keys,
                           milliseconds time) override;
    milliseconds own_limit() const { return std::max(timeout_, kLeast); }

    // The least time limit of calls that wait for nothing but the network. `timeout_` may be much
    // shorter.
    static constexpr milliseconds kLeast{10000};

    const std::shared_ptr<Wire> wire_;
};

}  // namespace diloco
