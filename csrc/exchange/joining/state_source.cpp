#include "exchange/joining/state_source.h"

#include <ATen/ops/empty.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "codec/digest.h"

namespace diloco {

using link::Clock;
using std::chrono::milliseconds;

namespace {

// The most bodies of one connection that the link has not sent yet; further requests of that
// connection wait, except kStatus.
constexpr size_t kMostBodies = 2;
// From this number of waiting requests on, requests of ended connections are removed.
constexpr size_t kMostWaiting = 1024;
// How long after its last request a replica counts as one that is joining.
constexpr milliseconds kRecent{3000};

template <class Items, class Text>
std::string list_of(const Items& items, Text text) {
    std::string joined;
    for (const auto& item : items) joined += (joined.empty() ? "" : ",") + text(item);
    return "[" + joined + "]";
}

std::string list_of(std::initializer_list<uint64_t> numbers) {
    return list_of(numbers, [](uint64_t number) { return std::to_string(number); });
}

at::Tensor bytes_of(const std::string& text) {
    at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
    std::memcpy(bytes.data_ptr(), text.data(), text.size());
    return bytes;
}

// The digest of one tensor, equal to the result of diloco_comm.ops.digests.digest_of.
uint64_t digest_of(const at::Tensor& tensor) {
    codec::DigestSums sums;
    const auto num_bytes = static_cast<uint64_t>(tensor.nbytes());
    codec::add_digest(static_cast<const uint8_t*>(tensor.data_ptr()), num_bytes, 0, sums);
    return wire::mix64(1 ^ wire::finish_digest(sums.product, sums.sum, num_bytes));
}

StateSource::Kind kind_of(const link::Request& request) {
    uint32_t kind = 0;
    if (request.bytes.size() >= sizeof(kind)) {
        std::memcpy(&kind, request.bytes.data(), sizeof(kind));
    }
    return static_cast<StateSource::Kind>(kind);
}

}  // namespace

struct StateSource::UnderWay : link::Responder {
    bool take(link::Request request) override {
        const std::lock_guard<std::mutex> lock(mutex);
        if (is_closing) return false;
        if (waiting.size() >= kMostWaiting) forget_ended();
        waiting.push_back(std::move(request));
        changed.notify_all();
        return true;
    }

    // Removes the requests of connections that have ended.
    void forget_ended() {
        const auto has_ended = [](const link::Request& one) { return one.connection.expired(); };
        waiting.erase(std::remove_if(waiting.begin(), waiting.end(), has_ended), waiting.end());
    }

    std::mutex mutex;
    std::condition_variable changed;
    std::deque<link::Request> waiting;
    std::map<uint64_t, size_t> num_bodies;  // unsent bodies by the connection's id
    bool is_closing = false;

    // Counts a body as unsent, and returns its owner for the link. When the link has sent the body
    // and drops the owner, the body does not count any more.
    static std::shared_ptr<const void> keep(const std::shared_ptr<UnderWay>& state,
                                            uint64_t connection, const at::Tensor& body) {
        const std::lock_guard<std::mutex> lock(state->mutex);
        ++state->num_bodies[connection];
        return {body.data_ptr(), [state, connection, body](const void*) {
                    const std::lock_guard<std::mutex> lock(state->mutex);
                    if (--state->num_bodies[connection] == 0) state->num_bodies.erase(connection);
                    state->changed.notify_all();
                }};
    }
};

StateSource::StateSource(std::vector<std::vector<at::Tensor>> parts)
    : under_way_(std::make_shared<UnderWay>()), pid_(getpid()) {
    for (std::vector<at::Tensor>& tensors : parts) {
        auto part = std::make_unique<Part>();
        part->num_elements = static_cast<uint64_t>(tensors.at(0).numel());
        for (at::Tensor& tensor : tensors) {
            TORCH_CHECK_VALUE(tensor.scalar_type() == at::kFloat && tensor.is_contiguous() &&
                                  tensor.numel() == tensors[0].numel(),
                              "an outer state has contiguous fp32 tensors of one size");
            part->tensors.push_back(tensor.detach());
            const c10::Device device = tensor.device();
            if (!device.is_cpu() && streams_.count(device) == 0) {
                streams_[device] = std::make_unique<OwnStream>(device);
            }
        }
        parts_.push_back(std::move(part));
    }
    thread_ = std::thread([this] { run(); });
}

StateSource::~StateSource() { close(); }

std::shared_ptr<link::Responder> StateSource::responder() const { return under_way_; }

void StateSource::close() {
    if (pid_ != getpid()) {
        // In a forked child the thread does not exist. Leak its handle, and the mutex and condition
        // variable that it may have been using.
        new std::thread(std::move(thread_));
        new std::shared_ptr<UnderWay>(under_way_);
        return;
    }
    std::deque<link::Request> unanswered;
    {
        const std::lock_guard<std::mutex> lock(under_way_->mutex);
        under_way_->is_closing = true;
        unanswered.swap(under_way_->waiting);
        under_way_->changed.notify_all();
    }
    if (thread_.joinable()) thread_.join();
    for (const link::Request& request : unanswered) request.answer({}, {});
}

// --------------------------------------------------------------------------- the training thread

void StateSource::begin_write(size_t fragment) { parts_.at(fragment)->num_writes.fetch_add(1); }

void StateSource::end_write(size_t fragment, const Standing& standing) {
    Part& part = *parts_.at(fragment);
    const c10::Device device = part.tensors[0].device();
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        part.standing = standing;
        if (!device.is_cpu()) part.written = mark_stream(caller_stream(device));
    }
    part.num_writes.fetch_add(1);
}

void StateSource::add(size_t fragment, uint64_t number, const std::string& entry,
                      std::vector<at::Tensor> payloads) {
    Round round;
    round.entry = entry;
    for (const at::Tensor& payload : payloads) {
        round.num_bytes += static_cast<uint64_t>(payload.nbytes());
    }
    round.payloads = std::move(payloads);
    const c10::Device device = parts_.at(fragment)->tensors[0].device();
    if (!device.is_cpu()) round.copied = mark_stream(caller_stream(device));
    const std::lock_guard<std::mutex> lock(rounds_mutex_);
    round.place = ++num_added_;
    rounds_[{fragment, number}] = std::move(round);
}

void StateSource::remove(size_t fragment, uint64_t number) {
    const std::lock_guard<std::mutex> lock(rounds_mutex_);
    rounds_.erase({fragment, number});
}

void StateSource::open(const std::vector<Standing>& standings) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < parts_.size(); ++i) parts_[i]->standing = standings.at(i);
    is_open_ = true;
}

// -------------------------------------------------------------------------------- the own thread

void StateSource::run() {
    std::unique_lock<std::mutex> lock(under_way_->mutex);
    while (true) {
        const std::optional<link::Request> request = next(lock);
        if (!request) return;
        lock.unlock();
        std::vector<uint8_t> head(sizeof(Found));
        link::Body body;
        try {
            const Result result = answer(*request);
            std::memcpy(head.data(), &result.found, sizeof(Found));
            if (result.body.defined()) {
                body.owner = UnderWay::keep(under_way_, request->connection_id, result.body);
                body.data = static_cast<const uint8_t*>(result.body.data_ptr());
                body.num_bytes = static_cast<uint64_t>(result.body.nbytes());
            }
            const auto kind = static_cast<Kind>(result.found.kind);
            const bool is_copy = kind == Kind::kElements || kind == Kind::kPayloads;
            if (is_copy) served_bytes_ += result.body.nbytes();
        } catch (const std::exception&) {
            // An unexpected error, such as a lack of memory: send an answer with an empty head.
            head.clear();
            body = {};
        }
        request->answer(std::move(head), std::move(body));
        lock.lock();
    }
}

// Waits for the next request to answer: a kStatus, else the first request of a connection with
// fewer than kMostBodies unsent bodies. Returns null after close().
std::optional<link::Request> StateSource::next(std::unique_lock<std::mutex>& lock) {
    UnderWay& state = *under_way_;
    while (!state.is_closing) {
        state.forget_ended();
        const auto has_room = [&](const link::Request& request) {
            const auto bodies = state.num_bodies.find(request.connection_id);
            return bodies == state.num_bodies.end() || bodies->second < kMostBodies;
        };
        const auto is_status = [](const auto& one) { return kind_of(one) == Kind::kStatus; };
        // A status goes first, because the rounds that it lists are removed soon.
        auto found = std::find_if(state.waiting.begin(), state.waiting.end(), is_status);
        if (found == state.waiting.end()) {
            found = std::find_if(state.waiting.begin(), state.waiting.end(), has_room);
        }
        if (found != state.waiting.end()) {
            link::Request request = std::move(*found);
            state.waiting.erase(found);
            return request;
        }
        state.changed.wait(lock);
    }
    return std::nullopt;
}

StateSource::Result StateSource::answer(const link::Request& request) {
    const auto now = Clock::now();
    num_askers(now);
    asked_at_[request.connection_id] = {now, request.connection};
    try {
        return result_of(request);
    } catch (const std::invalid_argument& error) {
        Result result;
        result.found.kind = static_cast<uint32_t>(Kind::kRefused);
        result.body = bytes_of(error.what());
        return result;
    }
}

StateSource::Result StateSource::result_of(const link::Request& request) {
    Wanted wanted;
    if (request.bytes.size() != sizeof(wanted)) {
        throw std::invalid_argument("this is no request of a replica that joins");
    }
    std::memcpy(&wanted, request.bytes.data(), sizeof(wanted));
    if (!is_open_) throw std::invalid_argument("this replica does not hold the state of the group");
    const Kind kind = kind_of(request);
    if (kind == Kind::kStatus) return status(wanted);
    if (kind != Kind::kState && kind != Kind::kDigest && kind != Kind::kRound) {
        throw std::invalid_argument("a request of kind " + std::to_string(wanted.kind) +
                                    " is not known");
    }
    if (wanted.fragment >= parts_.size()) {
        throw std::invalid_argument("there are " + std::to_string(parts_.size()) +
                                    " fragments, and no " + std::to_string(wanted.fragment));
    }
    return kind == Kind::kRound ? round(wanted) : state(wanted, *parts_[wanted.fragment]);
}

// Answers kStatus in JSON: the standing of each fragment with its oldest round in the log, the
// log's entries that the asker does not know, the place of the last entry, and the number of
// newcomers.
StateSource::Result StateSource::status(const Wanted& wanted) {
    Result result;
    std::vector<Standing> standings;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& part : parts_) {
            if (part->num_writes % 2 != 0) {
                result.found.kind = static_cast<uint32_t>(Kind::kLater);
                return result;
            }
            standings.push_back(part->standing);
        }
    }
    const std::lock_guard<std::mutex> lock(rounds_mutex_);
    size_t index = 0;
    const std::string fragments = list_of(standings, [&](const Standing& standing) {
        const auto lowest = rounds_.lower_bound({index, 0});
        const bool has_any = lowest != rounds_.end() && lowest->first.first == index;
        ++index;
        return list_of({standing.round, standing.history, standing.num_steps,
                        has_any ? lowest->first.second : standing.round});
    });
    std::vector<const Round*> unknown;
    for (const auto& [key, round] : rounds_) {
        if (round.place > wanted.number) unknown.push_back(&round);
    }
    const std::string log = list_of(unknown, [](const Round* round) { return round->entry; });
    result.found.kind = static_cast<uint32_t>(Kind::kIsAt);
    result.body = bytes_of("{\"fragments\":" + fragments + ",\"log\":" + log +
                           ",\"last\":" + std::to_string(num_added_) +
                           ",\"num_newcomers\":" + std::to_string(num_askers(Clock::now())) + "}");
    return result;
}

// The number of connections over which a request has come lately; forgets the others.
size_t StateSource::num_askers(Clock::time_point now) {
    for (auto it = asked_at_.begin(); it != asked_at_.end();) {
        const auto& [at, connection] = it->second;
        const bool is_gone = now - at > kRecent || connection.expired();
        it = is_gone ? asked_at_.erase(it) : std::next(it);
    }
    return asked_at_.size();
}

StateSource::Result StateSource::state(const Wanted& wanted, Part& part) {
    const uint64_t most = std::max<uint64_t>(1, kMostBytes / (sizeof(float) * part.tensors.size()));
    const uint64_t begin = wanted.begin, end = wanted.end;
    if (begin >= end || end > part.num_elements || end - begin > most) {
        throw std::invalid_argument("fragment " + std::to_string(wanted.fragment) + " has " +
                                    std::to_string(part.num_elements) +
                                    " elements, and an answer has at most " + std::to_string(most) +
                                    ", got [" + std::to_string(begin) + ", " + std::to_string(end) +
                                    ")");
    }
    Result result;
    const uint64_t num_writes = part.num_writes.load(std::memory_order_acquire);
    Mark written;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        result.found.standing = part.standing;
        written = part.written;
    }
    at::Tensor values;
    if (num_writes % 2 == 0) values = copy(part, written, begin, end);
    // fetch_add(0) instead of load(): a write, so that no read of the values is moved after this
    // check.
    if (num_writes % 2 != 0 || part.num_writes.fetch_add(0) != num_writes) {
        result.found.kind = static_cast<uint32_t>(Kind::kLater);
        return result;
    }
    result.found.digest = digest_of(values);
    const bool is_digest = wanted.kind == static_cast<uint32_t>(Kind::kDigest);
    result.found.kind = static_cast<uint32_t>(is_digest ? Kind::kHashed : Kind::kElements);
    if (!is_digest) result.body = values;
    return result;
}

// Copies elements [begin, end) of all tensors: fp32 [number of tensors, end - begin], in host
// memory.
at::Tensor StateSource::copy(Part& part, const Mark& written, uint64_t begin, uint64_t end) const {
    const auto count = static_cast<int64_t>(end - begin);
    const auto num_rows = static_cast<int64_t>(part.tensors.size());
    const c10::Device device = part.tensors[0].device();
    const auto options = at::TensorOptions().dtype(at::kFloat);
    at::Tensor values = at::empty({num_rows, count}, options.pinned_memory(!device.is_cpu()));
    const OwnStream* const stream = device.is_cpu() ? nullptr : streams_.at(device).get();
    if (stream && written) written->block(stream->get());
    for (int64_t row = 0; row < num_rows; ++row) {
        const at::Tensor& tensor = part.tensors[static_cast<size_t>(row)];
        if (stream) {
            copy_on(stream->get(), values[row],
                    tensor.slice(0, static_cast<int64_t>(begin), static_cast<int64_t>(end)));
        } else {
            std::memcpy(values.data_ptr<float>() + row * count, tensor.data_ptr<float>() + begin,
                        static_cast<size_t>(count) * sizeof(float));
        }
    }
    if (stream) mark_stream(stream->get())->synchronize();
    return values;
}

StateSource::Result StateSource::round(const Wanted& wanted) {
    if (wanted.end - wanted.begin > kMostBytes || wanted.begin >= wanted.end) {
        throw std::invalid_argument("an answer has 1 to " + std::to_string(kMostBytes) +
                                    " bytes of a round, got [" + std::to_string(wanted.begin) +
                                    ", " + std::to_string(wanted.end) + ")");
    }
    Result result;
    const std::lock_guard<std::mutex> lock(rounds_mutex_);
    const auto found = rounds_.find({wanted.fragment, wanted.number});
    if (found == rounds_.end() || wanted.end > found->second.num_bytes) {
        result.found.kind = static_cast<uint32_t>(Kind::kGone);
        return result;
    }
    if (found->second.copied) found->second.copied->synchronize();
    at::Tensor bytes = at::empty({static_cast<int64_t>(wanted.end - wanted.begin)}, at::kByte);
    uint64_t offset = 0;  // of the present payload in the round's bytes
    for (const at::Tensor& payload : found->second.payloads) {
        const auto size = static_cast<uint64_t>(payload.nbytes());
        const uint64_t first = std::max(wanted.begin, offset);
        const uint64_t last = std::min(wanted.end, offset + size);
        if (first < last) {
            std::memcpy(bytes.data_ptr<uint8_t>() + (first - wanted.begin),
                        static_cast<const uint8_t*>(payload.data_ptr()) + (first - offset),
                        last - first);
        }
        offset += size;
    }
    result.found.kind = static_cast<uint32_t>(Kind::kPayloads);
    result.found.digest = digest_of(bytes);
    result.body = bytes;
    return result;
}

}  // namespace diloco
