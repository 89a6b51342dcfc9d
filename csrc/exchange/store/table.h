// The contents of a store's host: values by key, the record of each run, and the members' beats and
// posts.
//
// Values are for c10d. Records change by compare-and-swap alone, and with a journal a swap counts
// when the journal holds it. Beats and posts are in memory.
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

// The values by key. Threads share it.
class Table {
  public:
    // `poke` is called when a watched key has got a value, under the table's mutex.
    explicit Table(std::function<void()> poke) : poke_(std::move(poke)) {}

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
    // Does what a request asks for that waits for nothing.
    Packet answer(const Packet& request);
    // Returns the values once all are there; null when `end` has passed.
    std::optional<Keys> wait(const Keys& keys, Clock::time_point end);

    // Returns the values if all are there; else watches the first missing key and names it.
    std::optional<Keys> find(const Keys& keys, std::string& missing);
    void unwatch(const std::string& key);
    // The watched keys that have got a value since the last call; they are watched no more.
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

// A run and its new record; empty: the run has none any more.
using Change = std::pair<std::string, std::string>;

// The record of each run. The host's thread adds swaps and advances; the journal's thread takes the
// changes of one group after another, writes them and settles them.
class Records {
  public:
    // kMostChanges: of a group; kMostWaiting: swaps that no group has taken yet.
    static constexpr size_t kMostBytes = 61440, kMostRuns = 1024, kMostChanges = 64,
                            kMostWaiting = 512;

    struct Record {
        std::string bytes{};
        uint64_t revision = 0;  // another one after each change; 0: there is no record
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
    // The record that a crash would leave.
    Record read(const std::string& run) const;
    // All of them, by run.
    std::map<std::string, std::string> all() const;
    // advance() answers.
    void swap(int client, const Keys& parts);
    // The client has gone: its swap does not happen, unless it is under way.
    void forget(int client);
    // Returns the answers that are due, and adds the runs that have changed to `changed`.
    std::vector<Done> advance(Keys& changed);

    // On the journal's thread: the next group, or nothing when the time has passed.
    std::vector<Change> take(std::chrono::milliseconds time);
    // Whether the journal holds the taken group: an empty sentence, or why not. `is_doubtful`: the
    // disk has not said whether a crash would leave it.
    void settle(const std::string& sentence, bool is_doubtful);

  private:
    enum class Stage { kOpen, kOffered, kTaken, kSettled };
    struct Swap {
        int client = 0;
        std::string run{}, old{}, next{};
    };
    // The outcome if the group can be written; a certain one holds in any case.
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
    // The group.
    Stage stage_ = Stage::kOpen;
    std::vector<Change> changes_;
    std::vector<Outcome> outcomes_;
    std::string trouble_;
};

// ------------------------------------------------------------------------------------- beats

// The last beat of each member of each run. The first line of a text is what other members need;
// the rest may be another one in each beat. A second object of this class has the members' posts,
// which no other member reads. Threads share an object.
class Beats {
  public:
    // kMostBytes and kMostPosted: of a beat, and of a post; kMostMembers: of a run; kMostBeats and
    // kMostSum: of all runs.
    static constexpr size_t kMostBytes = 16384, kMostPosted = 2048, kMostMembers = 1024,
                            kMostBeats = 16384, kMostSum = size_t{64} << 20;

    // The beats that a member has not seen yet.
    struct Seen {
        uint64_t version = 0;  // rises with each first line that is another one
        bool is_whole = true;  // `changed` has all beats
        std::string counts{};  // the last byte of the number of each member's beats, by name
        Keys changed{};        // member, text and age in milliseconds
    };

    struct Last {
        std::string run{}, member{}, text{};
        Clock::duration age{};
    };

    // Beats that no other has followed for `drop_after` are dropped.
    explicit Beats(Clock::duration drop_after, size_t most_bytes = kMostBytes);

    // The time since the last call passes, but for a gap in which this process stood still: then no
    // member could beat.
    void pass_time();
    // Keeps a member's beat, an empty text takes the beat back, and an empty name does neither.
    // Throws std::invalid_argument for what does not fit.
    void put(const std::string& run, const std::string& member, const std::string& text);
    // As put(); returns what has changed since the version `known`, or all.
    Seen beat(const std::string& run, const std::string& member, const std::string& text,
              uint64_t known = 0);
    std::vector<Last> all() const;

  private:
    using Time = Clock::duration;
    struct Beat {
        std::string text{};
        Time at{};
        uint64_t version = 0;  // of the first line
        uint8_t count = 0;
    };
    struct Run {
        std::map<std::string, Beat> beats{};
        uint64_t since = 0;  // the version after which no beat has gone
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

// Throws std::invalid_argument unless a text has 1 to 400 bytes of UTF-8 without space and control
// characters; the name of a run has no slash either.
void check_name(const char* what, const std::string& name);

// Values as torch's stores have them: each call is a request.
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
    // A function of c10d::Store in newer versions of torch.
    Keys listKeys();

  protected:
    // Both return the answer kDone, or throw.
    virtual Packet ask(Request request, Keys parts, int64_t number = 0) = 0;
    virtual Packet wait_for(Request request, const Keys& keys, milliseconds time) = 0;
};

}  // namespace diloco::store
