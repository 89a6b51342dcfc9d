// The contents of a store's host: values by key, the record of each run, and the members' beats and
// posts.
//
// Values serve as a c10d store. A record changes by compare-and-swap only; with a journal, a swap
// takes effect when the journal holds it. Beats and posts are in memory only.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "exchange/store/channel.h"

namespace diloco::store {

using Keys = std::vector<std::string>;

// ------------------------------------------------------------------------------------ values

// The store's values by key. Several threads may use a table at the same time.
class Table {
  public:
    // `poke` is called, under the table's mutex, when a watched key has been set.
    explicit Table(std::function<void()> poke) : poke_(std::move(poke)) {}

    // Writes pairs of key and value.
    void set(const Keys& pairs);
    // As TCPStore does: a missing key counts as an empty value. If it is missing and `expected` is
    // not empty, nothing is set, and `expected` is returned.
    std::string compare_set(const std::string& key, const std::string& expected,
                            const std::string& desired);
    // Throws std::invalid_argument if the value is no number.
    int64_t add(const std::string& key, int64_t amount);
    void append(const std::string& key, const std::string& value);
    bool remove(const std::string& key);
    bool has(const Keys& keys) const;
    Keys list() const;
    // Carries out a request that need not wait, and returns the answer.
    Packet answer(const Packet& request);
    // Waits until all keys are set, and returns their values; null if `end` comes first.
    std::optional<Keys> wait(const Keys& keys, Clock::time_point end);

    // Returns the values if all keys are set. Else returns null, and watches the first missing key,
    // which `missing` names.
    std::optional<Keys> find(const Keys& keys, std::string& missing);
    void unwatch(const std::string& key);
    // The watched keys that were set since the last call; they are not watched any more.
    Keys take_fresh();

  private:
    const std::string* missing_of(const Keys& keys) const;
    Keys values_of(const Keys& keys) const;
    void has_changed(const std::string& key);

    const std::function<void()> poke_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::unordered_map<std::string, std::string> values_;
    std::unordered_set<std::string> watched_;
    Keys fresh_;
};

// ----------------------------------------------------------------------------------- records

// A run and its new record; an empty record means that the run has none any more.
using Change = std::pair<std::string, std::string>;

// The record of each run. The host's thread calls swap() and advance(), which collects waiting
// swaps in a batch. With a journal, the journal's thread takes the changes of a batch by take(),
// writes them, and calls settle(); then advance() answers the swaps.
class Records {
  public:
    // The limits: bytes of a record, runs, changes of a batch, and swaps that wait for a batch.
    static constexpr size_t kMostBytes = 61440, kMostRuns = 1024, kMostChanges = 64,
                            kMostWaiting = 512;

    struct Record {
        std::string bytes{};
        uint64_t revision = 0;  // differs after each change; 0: there is no record
    };
    // The answer to a swap of a client.
    struct Done {
        int client = 0;
        Packet answer{};
    };

    // `poke` is called after settle().
    Records(bool is_journalled, std::map<std::string, std::string> records,
            std::function<void()> poke);

    bool is_journalled() const { return is_journalled_; }
    // The record of a run, without swaps that the journal does not hold yet.
    Record read(const std::string& run) const;
    // The records of all runs.
    std::map<std::string, std::string> all() const;
    // Queues a client's request to replace the record of a run (a swap); advance() will return the
    // answer. `parts` are the run, the expected record and the new record.
    void swap(int client, const Keys& parts);
    // Drops the swap of a client that has gone, unless it is in a batch already.
    void forget(int client);
    // Returns the answers that are due, and adds the runs that have changed to `changed`.
    std::vector<Done> advance(Keys& changed);

    // The journal's thread: waits for the next batch of changes; empty if the time has passed.
    std::vector<Change> take(std::chrono::milliseconds time);
    // The journal's thread: ends the batch. `sentence` is empty if the journal holds it, else the
    // error. `is_doubtful`: it is unknown whether the journal would have the batch after a crash.
    void settle(const std::string& sentence, bool is_doubtful);

  private:
    enum class Stage { kOpen, kOffered, kTaken, kSettled };
    struct Swap {
        int client = 0;
        std::string run{}, old{}, next{};
    };
    // The outcome of a swap if the batch can be written. It holds in any case if is_certain: the
    // swap has failed, and does not depend on another swap of the batch.
    struct Outcome {
        int client = 0;
        bool is_swapped = false, is_certain = false;
    };

    void judge(const Swap& swap, std::vector<Done>& done);
    void apply(Keys& changed);
    void finish(std::vector<Done>& done);

    const bool is_journalled_;
    const std::function<void()> poke_;
    mutable std::mutex mutex_;
    std::condition_variable offered_;
    uint64_t revision_;
    std::map<std::string, Record> records_;
    std::deque<Swap> waiting_;
    // The present batch.
    Stage stage_ = Stage::kOpen;
    std::vector<Change> changes_;
    std::vector<Outcome> outcomes_;
    std::string trouble_;
};

// ------------------------------------------------------------------------------------- beats

// The last beat of each member of each run. Other members need only the first line of a beat's
// text, and are told of a beat only if its first line has changed. A second object of this class
// has the members' posts, which no other member reads. Threads may use an object at the same time.
class Beats {
  public:
    // The limits: bytes of a beat and of a post, members of a run, and of all runs together the
    // beats and their bytes.
    static constexpr size_t kMostBytes = 16384, kMostPosted = 2048, kMostMembers = 1024,
                            kMostBeats = 16384, kMostSum = size_t{64} << 20;

    // The beats that a member has not seen yet.
    struct Seen {
        uint64_t version = 0;  // rises whenever the first line of some beat changes
        bool is_whole = true;  // `changed` has the beats of all members, not only changed ones
        std::string counts{};  // one byte for each member, by name: its number of beats mod 256
        Keys changed{};        // for each beat: member, text and age in milliseconds
    };

    struct Last {
        std::string run{}, member{}, text{};
        Clock::duration age{};
    };

    // A beat is dropped if the member has sent no other for the time `drop_after`.
    explicit Beats(Clock::duration drop_after, size_t most_bytes = kMostBytes);

    // Advances the clock of the beats' ages by the time since the last call, at most by a second:
    // after a longer gap this process was stopped, and no member could beat.
    void pass_time();
    // Keeps a member's beat. With an empty text the member's beat is removed, and with an empty
    // member nothing is kept. Throws std::invalid_argument if the beat does not fit.
    void put(const std::string& run, const std::string& member, const std::string& text);
    // As put(). Returns the beats that have changed since the version `known`, or all beats.
    Seen beat(const std::string& run, const std::string& member, const std::string& text,
              uint64_t known = 0);
    std::vector<Last> all() const;

  private:
    using Time = Clock::duration;
    struct Beat {
        std::string text{};
        Time at{};
        uint64_t version = 0;  // the version at which the first line changed last
        uint8_t count = 0;
    };
    struct Run {
        std::map<std::string, Beat> beats{};
        uint64_t since = 0;  // the version at which the run began, or a beat was removed last
    };

    bool is_late(const Beat& beat) const { return now_ - beat.at > drop_after_; }
    void drop(const std::string& run);
    void keep(const std::string& run, const std::string& member, const std::string& text);
    void forget(const std::string& run, const std::string& member);

    const Time drop_after_;
    const size_t most_bytes_;
    mutable std::mutex mutex_;
    std::map<std::string, Run> runs_;
    uint64_t version_;
    size_t num_beats_ = 0, num_bytes_ = 0;
    Time now_{}, sweeps_at_{};
    std::optional<Clock::time_point> looked_at_;
};

// Throws std::invalid_argument unless `name` has 1 to 400 bytes of UTF-8 without space and control
// characters. If `what` is "run", slashes are not allowed either.
void check_name(const char* what, const std::string& name);

// The functions of a c10d store. Each function makes a request, which a subclass carries out.
class Values : public c10d::Store {
  public:
    using Bytes = std::vector<uint8_t>;
    using milliseconds = std::chrono::milliseconds;
    using c10d::Store::compareSet;
    using c10d::Store::set;

    using c10d::Store::Store;

    void set(const std::string& key, const Bytes& value) override;
    Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override;
    Bytes get(const std::string& key) override;
    int64_t add(const std::string& key, int64_t value) override;
    bool deleteKey(const std::string& key) override;
    bool check(const Keys& keys) override;
    int64_t getNumKeys() override;
    void wait(const Keys& keys) override;
    void wait(const Keys& keys, const milliseconds& timeout) override;
    void append(const std::string& key, const Bytes& value) override;
    std::vector<Bytes> multiGet(const Keys& keys) override;
    void multiSet(const Keys& keys, const std::vector<Bytes>& values) override;
    bool hasExtendedApi() const override { return true; }
    // Newer versions of torch have this function in c10d::Store.
    Keys listKeys();

  protected:
    // Carry out a request, wait_for() one that may wait. Both return an answer of kind kDone, or
    // throw.
    virtual Packet ask(Request request, Keys parts, int64_t number = 0) = 0;
    virtual Packet wait_for(Request request, const Keys& keys, milliseconds time) = 0;
};

}  // namespace diloco::store
