#include "exchange/store/table.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <stdexcept>
#include <string_view>

namespace diloco::store {
namespace {

using std::chrono::milliseconds;

constexpr size_t kMostName = 400;
// In a longer gap between two calls of pass_time() this process was stopped.
constexpr milliseconds kMostGap{1000};
// While no more beats fit, all runs are searched for late beats at most once in this time, so that
// refusing a beat costs little.
constexpr milliseconds kSweep{2000};

// The number of bytes of the UTF-8 character at `at`; 0 if the bytes are not UTF-8.
size_t bytes_of_character(const std::string& text, size_t at) {
    const auto first = static_cast<uint8_t>(text[at]);
    const size_t size = first < 0x80                     ? 1
                        : first >= 0xc2 && first < 0xe0  ? 2
                        : first >= 0xe0 && first < 0xf0  ? 3
                        : first >= 0xf0 && first <= 0xf4 ? 4
                                                         : 0;
    if (size > text.size() - at) return 0;
    for (size_t i = 1; i < size; ++i) {
        if ((static_cast<uint8_t>(text[at + i]) & 0xc0) != 0x80) return 0;
    }
    const auto second = size > 1 ? static_cast<uint8_t>(text[at + 1]) : uint8_t{0};
    // These are no UTF-8 either: overlong forms, surrogates, and numbers above U+10FFFF.
    const bool is_none = (first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
                         (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f);
    return is_none ? 0 : size;
}

[[noreturn]] void refuse(const std::string& sentence) { throw std::invalid_argument(sentence); }

}  // namespace

void check_name(const char* what, const std::string& name) {
    bool is_name = !name.empty() && name.size() <= kMostName;
    const bool may_have_slash = std::strcmp(what, "run") != 0;
    for (size_t at = 0; is_name && at < name.size();) {
        const size_t size = bytes_of_character(name, at);
        const auto byte = static_cast<uint8_t>(name[at]);
        is_name = size > 0 && byte > ' ' && byte != 0x7f && (may_have_slash || byte != '/');
        at += size;
    }
    if (is_name) return;
    refuse(std::string(what) + " must have 1 to " + std::to_string(kMostName) +
           " bytes of UTF-8 without space and control characters" +
           (may_have_slash ? "" : " and slash"));
}

// ------------------------------------------------------------------------------------ values

void Table::has_changed(const std::string& key) {
    if (!watched_.empty() && watched_.erase(key) > 0) {
        fresh_.push_back(key);
        poke_();
    }
    changed_.notify_all();
}

void Table::set(const Keys& pairs) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i + 1 < pairs.size(); i += 2) {
        values_[pairs[i]] = pairs[i + 1];
        has_changed(pairs[i]);
    }
}

std::string Table::compare_set(const std::string& key, const std::string& expected,
                               const std::string& desired) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = values_.find(key);
    if (found == values_.end() && !expected.empty()) return expected;
    if (found != values_.end() && found->second != expected) return found->second;
    values_[key] = desired;
    has_changed(key);
    return desired;
}

int64_t Table::add(const std::string& key, int64_t amount) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = values_.find(key);
    const std::string value = found == values_.end() ? "" : found->second;
    int64_t sum = 0;
    const char* const end = value.data() + value.size();
    const auto [stop, error] = std::from_chars(value.data(), end, sum);
    if (!value.empty() && (error != std::errc() || stop != end)) {
        refuse("add() needs a number, and the store holds text at " + key);
    }
    if (__builtin_add_overflow(sum, amount, &sum)) {
        refuse("the number of the store at " + key + " would be too large");
    }
    values_[key] = std::to_string(sum);
    has_changed(key);
    return sum;
}

void Table::append(const std::string& key, const std::string& value) {
    const std::lock_guard<std::mutex> lock(mutex_);
    values_[key] += value;
    has_changed(key);
}

bool Table::remove(const std::string& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return values_.erase(key) > 0;
}

const std::string* Table::missing_of(const Keys& keys) const {
    const auto missing = std::find_if(keys.begin(), keys.end(), [this](const std::string& key) {
        return values_.count(key) == 0;
    });
    return missing == keys.end() ? nullptr : &*missing;
}

Keys Table::values_of(const Keys& keys) const {
    size_t size = 0;
    // The size is checked first: a request may name the same key many times.
    for (const std::string& key : keys) size += values_.at(key).size();
    if (size > Packet::kMostBytes) {
        refuse("a store gives at most 64 MiB at a time, and these keys hold " +
               std::to_string(size) + " bytes");
    }
    Keys values;
    for (const std::string& key : keys) values.push_back(values_.at(key));
    return values;
}

bool Table::has(const Keys& keys) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return missing_of(keys) == nullptr;
}

Keys Table::list() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    Keys keys;
    for (const auto& [key, value] : values_) keys.push_back(key);
    return keys;
}

Packet Table::answer(const Packet& request) {
    const Keys& parts = request.parts;
    const auto done = [](int64_t number, Keys found = {}) {
        return Packet{static_cast<uint8_t>(Answer::kDone), number, std::move(found)};
    };
    switch (static_cast<Request>(request.kind)) {
        case Request::kSet:
        case Request::kMultiSet:
            set(parts);
            return done(0);
        case Request::kCompareSet:
            return done(0, {compare_set(parts.at(0), parts.at(1), parts.at(2))});
        case Request::kAdd:
            return done(add(parts.at(0), request.number));
        case Request::kAppend:
            append(parts.at(0), parts.at(1));
            return done(0);
        case Request::kDelete:
            return done(remove(parts.at(0)));
        case Request::kCheck:
            return done(has(parts));
        case Request::kCount:
            return done(static_cast<int64_t>(list().size()));
        case Request::kListKeys:
            return done(0, list());
        default:
            refuse("the store knows no request of kind " + std::to_string(request.kind));
    }
}

std::optional<Keys> Table::wait(const Keys& keys, Clock::time_point end) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (missing_of(keys) != nullptr) {
        if (Clock::now() >= end) return std::nullopt;
        changed_.wait_until(lock, end);
    }
    return values_of(keys);
}

std::optional<Keys> Table::find(const Keys& keys, std::string& missing) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::string* const found = missing_of(keys);
    if (found == nullptr) return values_of(keys);
    missing = *found;
    watched_.insert(missing);
    return std::nullopt;
}

void Table::unwatch(const std::string& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    watched_.erase(key);
}

Keys Table::take_fresh() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(fresh_, {});
}

// ---------------------------------------------------------------------------- values for torch

void Values::set(const std::string& key, const Bytes& value) {
    ask(Request::kSet, {key, text_of(value)});
}

Values::Bytes Values::compareSet(const std::string& key, const Bytes& expected,
                                 const Bytes& desired) {
    const Packet answer = ask(Request::kCompareSet, {key, text_of(expected), text_of(desired)});
    return bytes_of(answer.parts.at(0));
}

Values::Bytes Values::get(const std::string& key) { return multiGet({key}).front(); }

int64_t Values::add(const std::string& key, int64_t value) {
    return ask(Request::kAdd, {key}, value).number;
}

bool Values::deleteKey(const std::string& key) { return ask(Request::kDelete, {key}).number != 0; }

bool Values::check(const Keys& keys) { return ask(Request::kCheck, keys).number != 0; }

int64_t Values::getNumKeys() { return ask(Request::kCount, {}).number; }

void Values::wait(const Keys& keys) { wait(keys, timeout_); }

void Values::wait(const Keys& keys, const milliseconds& timeout) {
    wait_for(Request::kWait, keys, timeout);
}

void Values::append(const std::string& key, const Bytes& value) {
    ask(Request::kAppend, {key, text_of(value)});
}

std::vector<Values::Bytes> Values::multiGet(const Keys& keys) {
    const Packet answer = wait_for(Request::kGet, keys, timeout_);
    TORCH_CHECK_WITH(DistStoreError, answer.parts.size() == keys.size(),
                     "the store has answered for other keys");
    std::vector<Bytes> values;
    for (const std::string& text : answer.parts) values.push_back(bytes_of(text));
    return values;
}

void Values::multiSet(const Keys& keys, const std::vector<Bytes>& values) {
    ask(Request::kMultiSet, pairs_of(keys, values));
}

Keys Values::listKeys() { return ask(Request::kListKeys, {}).parts; }

// ----------------------------------------------------------------------------------- records

Records::Records(bool is_journalled, std::map<std::string, std::string> records,
                 std::function<void()> poke)
    : is_journalled_(is_journalled),
      poke_(std::move(poke)),
      // A random start, so that another process with the same table has other revisions.
      revision_(std::stoull(random_name().substr(0, 15), nullptr, 16) + 1) {
    for (auto& [run, bytes] : records) records_[run] = {std::move(bytes), ++revision_};
}

Records::Record Records::read(const std::string& run) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = records_.find(run);
    return found == records_.end() ? Record{} : found->second;
}

std::map<std::string, std::string> Records::all() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::map<std::string, std::string> found;
    for (const auto& [run, record] : records_) found.emplace(run, record.bytes);
    return found;
}

void Records::swap(int client, const Keys& parts) {
    check_name("run", parts.at(0));
    for (const std::string& record : {parts.at(1), parts.at(2)}) {
        if (record.size() <= kMostBytes) continue;
        refuse("a record has at most " + std::to_string(kMostBytes) + " bytes, got " +
               std::to_string(record.size()) + " bytes");
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (waiting_.size() >= kMostWaiting) refuse("too many swaps wait for the journal");
    waiting_.push_back({client, parts[0], parts[1], parts[2]});
}

void Records::forget(int client) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(),
                                  [client](const Swap& one) { return one.client == client; }),
                   waiting_.end());
}

// Compares a swap with the present record, and adds it to the batch. Answers at once if the
// registry has no room for another run.
void Records::judge(const Swap& swap, std::vector<Done>& done) {
    const auto changed = std::find_if(changes_.begin(), changes_.end(),
                                      [&](const Change& one) { return one.first == swap.run; });
    const auto found = records_.find(swap.run);
    const bool is_known = changed != changes_.end() || found != records_.end();
    const std::string& present = changed != changes_.end() ? changed->second
                                 : found != records_.end() ? found->second.bytes
                                                           : std::string();
    if (present != swap.old) {
        outcomes_.push_back({swap.client, false, changed == changes_.end()});
        return;
    }
    if (!is_known && !swap.next.empty() && records_.size() + changes_.size() >= kMostRuns) {
        done.push_back(
            {swap.client,
             {static_cast<uint8_t>(Answer::kFailed),
              0,
              {"this registry holds " + std::to_string(kMostRuns) + " runs, no more fit"}}});
        return;
    }
    if (changed != changes_.end()) {
        changed->second = swap.next;
    } else {
        changes_.emplace_back(swap.run, swap.next);
    }
    outcomes_.push_back({swap.client, true, false});
}

void Records::apply(Keys& changed) {
    for (auto& [run, bytes] : changes_) {
        changed.push_back(run);
        if (bytes.empty()) {
            records_.erase(run);
        } else {
            records_[run] = {std::move(bytes), ++revision_};
        }
    }
}

void Records::finish(std::vector<Done>& done) {
    for (const Outcome& outcome : outcomes_) {
        Packet answer{static_cast<uint8_t>(Answer::kDone), outcome.is_swapped ? 1 : 0, {}};
        if (!trouble_.empty() && !outcome.is_certain) {
            answer = {static_cast<uint8_t>(Answer::kFailed), 0, {trouble_}};
        }
        done.push_back({outcome.client, std::move(answer)});
    }
    outcomes_.clear();
    changes_.clear();
    trouble_.clear();
    stage_ = Stage::kOpen;
}

std::vector<Records::Done> Records::advance(Keys& changed) {
    std::vector<Done> done;
    const std::lock_guard<std::mutex> lock(mutex_);
    while (stage_ == Stage::kSettled || (stage_ == Stage::kOpen && !waiting_.empty())) {
        if (stage_ == Stage::kOpen) {
            while (!waiting_.empty() && changes_.size() < kMostChanges) {
                judge(waiting_.front(), done);
                waiting_.pop_front();
            }
            if (is_journalled_ && !changes_.empty()) {
                stage_ = Stage::kOffered;
                offered_.notify_all();
                break;
            }
        }
        if (trouble_.empty()) apply(changed);
        finish(done);
    }
    return done;
}

std::vector<Change> Records::take(milliseconds time) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!offered_.wait_for(lock, time, [this] { return stage_ == Stage::kOffered; })) return {};
    stage_ = Stage::kTaken;
    return changes_;
}

void Records::settle(const std::string& sentence, bool is_doubtful) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (stage_ != Stage::kTaken)
            refuse("settle() follows take_changes() that has returned any");
        trouble_ = sentence;
        if (is_doubtful) trouble_ += "; whether a crash would leave the swap is unknown";
        stage_ = Stage::kSettled;
    }
    poke_();
}

// ------------------------------------------------------------------------------------- beats

namespace {

std::string_view first_line(std::string_view text) { return text.substr(0, text.find('\n')); }

}  // namespace

// The first version is random, so that another process with the same table has other versions.
Beats::Beats(Clock::duration drop_after, size_t most_bytes)
    : drop_after_(drop_after),
      most_bytes_(most_bytes),
      version_(std::stoull(random_name().substr(0, 15), nullptr, 16)) {}

void Beats::pass_time() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto now = Clock::now();
    if (looked_at_) now_ += std::min<Time>(now - *looked_at_, kMostGap);
    looked_at_ = now;
}

void Beats::put(const std::string& run, const std::string& member, const std::string& text) {
    check_name("run", run);
    if (!member.empty()) {
        check_name("member", member);
        if (text.size() > most_bytes_) {
            refuse("a beat has at most " + std::to_string(most_bytes_) + " bytes, got " +
                   std::to_string(text.size()) + " bytes");
        }
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!member.empty()) text.empty() ? forget(run, member) : keep(run, member, text);
    drop(run);
}

Beats::Seen Beats::beat(const std::string& run, const std::string& member, const std::string& text,
                        uint64_t known) {
    put(run, member, text);
    const std::lock_guard<std::mutex> lock(mutex_);
    Seen seen;
    seen.version = version_;
    const auto found = runs_.find(run);
    if (found == runs_.end()) return seen;
    seen.is_whole = known < found->second.since || known > version_;
    for (const auto& [name, beat] : found->second.beats) {
        seen.counts.push_back(static_cast<char>(beat.count));
        if (!seen.is_whole && beat.version <= known) continue;
        const auto age = std::chrono::duration_cast<milliseconds>(now_ - beat.at);
        seen.changed.insert(seen.changed.end(), {name, beat.text, std::to_string(age.count())});
    }
    return seen;
}

std::vector<Beats::Last> Beats::all() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Last> found;
    for (const auto& [name, run] : runs_) {
        for (const auto& [member, beat] : run.beats) {
            if (!is_late(beat)) found.push_back({name, member, beat.text, now_ - beat.at});
        }
    }
    return found;
}

void Beats::keep(const std::string& run, const std::string& member, const std::string& text) {
    const auto is_full = [&] {
        const auto found = runs_.find(run);
        const auto* const beats = found == runs_.end() ? nullptr : &found->second.beats;
        const bool has_most = beats != nullptr && beats->size() >= kMostMembers;
        const auto former = beats == nullptr ? 0 : beats->count(member);
        const size_t freed = former == 0 ? 0 : beats->at(member).text.size();
        return (former == 0 && (has_most || num_beats_ >= kMostBeats)) ||
               num_bytes_ - freed + text.size() > kMostSum;
    };
    if (is_full() && now_ >= sweeps_at_) {
        sweeps_at_ = now_ + kSweep;
        Keys runs;
        for (const auto& [name, beats] : runs_) runs.push_back(name);
        for (const std::string& name : runs) drop(name);
    }
    if (is_full()) {
        refuse("this registry holds the beats of " + std::to_string(num_beats_) + " members in " +
               std::to_string(num_bytes_) + " bytes, no more fit");
    }
    Run& all = runs_[run];
    if (all.since == 0) all.since = ++version_;
    const auto placed = all.beats.try_emplace(member);
    Beat& beat = placed.first->second;
    if (placed.second) ++num_beats_;
    if (placed.second || first_line(beat.text) != first_line(text)) beat.version = ++version_;
    num_bytes_ += text.size() - beat.text.size();
    beat.text = text;
    beat.at = now_;
    ++beat.count;
}

void Beats::forget(const std::string& run, const std::string& member) {
    const auto found = runs_.find(run);
    if (found == runs_.end()) return;
    auto& [beats, since] = found->second;
    const auto beat = beats.find(member);
    if (beat == beats.end()) return;
    --num_beats_;
    num_bytes_ -= beat->second.text.size();
    beats.erase(beat);
    since = ++version_;
    if (beats.empty()) runs_.erase(found);
}

void Beats::drop(const std::string& run) {
    const auto found = runs_.find(run);
    if (found == runs_.end()) return;
    Keys late;
    for (const auto& [name, beat] : found->second.beats) {
        if (is_late(beat)) late.push_back(name);
    }
    for (const std::string& name : late) forget(run, name);
}

}  // namespace diloco::store
