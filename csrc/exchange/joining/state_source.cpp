#include "exchange/joining/state_source.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "codec/digest.h"

namespace diloco {

using link::Clock;
using std::chrono::milliseconds;

namespace {

// Bodies that wait for one connection; further requests wait until the link has sent one of them.
constexpr size_t kMostBodies = 2;
// So long a replica that has asked counts as one that joins.
constexpr milliseconds kRecent{3000};

std::string text_of(const StateSource::Standing& standing) {
    return "[" + std::to_string(standing.round) + "," + std::to_string(standing.history) + "," +
           std::to_string(standing.num_steps) + "]";
}

template <class Items, class Text>
std::string list_of(const Items& items, Text text) {
    std::string joined;
    for (const auto& item : items) joined += (joined.empty() ? "" : ",") + text(item);
    return "[" + joined + "]";
}

at::Tensor bytes_of(const std::string& text) {
    at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
    std::memcpy(bytes.data_ptr(), text.data(), text.size());
    return bytes;
}

// As diloco_comm.ops.digests.digest_of, of one tensor.
uint64_t digest_of(const at::Tensor& tensor) {
    codec::DigestSums sums;
    const auto num_bytes = static_cast<uint64_t>(tensor.nbytes());
    codec::add_digest(static_cast<const uint8_t*>(tensor.data_ptr()), num_bytes, 0, sums);
    return wire::mix64(1 ^ wire::finish_digest(sums.product, sums.sum, num_bytes));
}

}  // namespace

struct StateSource::UnderWay {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<link::Request> waiting;
    std::map<uint64_t, size_t> num_bodies;  // by connection
    bool is_closing = false;

    // The link keeps the result until the body has left.
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
    : under_way_(std::make_shared<UnderWay>()) {
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

void StateSource::close() {
    {
        const std::lock_guard<std::mutex> lock(under_way_->mutex);
        under_way_->is_closing = true;
        under_way_->changed.notify_all();
    }
    if (thread_.joinable()) thread_.join();
}

// --------------------------------------------------------------------------- the training thread

void StateSource::begin_write(size_t fragment) {
    parts_.at(fragment)->num_writes.fetch_add(1);
}

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
    order_.emplace_back(fragment, number);
    rounds_[order_.back()] = std::move(round);
}

void StateSource::remove(size_t fragment, uint64_t number) {
    const std::pair<size_t, uint64_t> key{fragment, number};
    const std::lock_guard<std::mutex> lock(rounds_mutex_);
    rounds_.erase(key);
    order_.erase(std::remove(order_.begin(), order_.end(), key), order_.end());
}

void StateSource::open(const std::vector<Standing>& standings) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < parts_.size(); ++i) parts_[i]->standing = standings.at(i);
    is_open_ = true;
}

// ----------------------------------------------------------------------------- the link's thread

void StateSource::take(link::Request request) {
    const std::lock_guard<std::mutex> lock(under_way_->mutex);
    if (under_way_->is_closing) return;
    under_way_->waiting.push_back(std::move(request));
    under_way_->changed.notify_all();
}

// -------------------------------------------------------------------------------- the own thread

void StateSource::run() {
    std::unique_lock<std::mutex> lock(under_way_->mutex);
    while (true) {
        const std::optional<link::Request> request = next(lock);
        if (!request) return;
        lock.unlock();
        Answer answer;
        try {
            answer = this->answer(*request);
        } catch (const std::exception& error) {
            answer.found.kind = static_cast<uint32_t>(Kind::kRefused);
            answer.body = bytes_of(error.what());
        }
        link::Body body;
        if (answer.body.defined()) {
            body.owner = UnderWay::keep(under_way_, request->connection_id, answer.body);
            body.data = static_cast<const uint8_t*>(answer.body.data_ptr());
            body.num_bytes = static_cast<uint64_t>(answer.body.nbytes());
            const auto kind = static_cast<Kind>(answer.found.kind);
            const bool is_copy = kind == Kind::kElements || kind == Kind::kPayloads;
            if (is_copy) served_bytes_ += answer.body.nbytes();
        }
        std::vector<uint8_t> head(sizeof(Found));
        std::memcpy(head.data(), &answer.found, sizeof(Found));
        request->answer(std::move(head), std::move(body));
        answer = Answer();
        lock.lock();
    }
}

// Waits for the first request of a connection that has room; null at the end.
std::optional<link::Request> StateSource::next(std::unique_lock<std::mutex>& lock) {
    UnderWay& state = *under_way_;
    while (!state.is_closing) {
        const auto found =
            std::find_if(state.waiting.begin(), state.waiting.end(), [&](const auto& request) {
                const auto bodies = state.num_bodies.find(request.connection_id);
                return bodies == state.num_bodies.end() || bodies->second < kMostBodies;
            });
        if (found != state.waiting.end()) {
            link::Request request = std::move(*found);
            state.waiting.erase(found);
            return request;
        }
        state.changed.wait(lock);
    }
    return std::nullopt;
}

StateSource::Answer StateSource::answer(const link::Request& request) {
    Wanted wanted;
    if (request.bytes.size() != sizeof(wanted)) {
        throw std::invalid_argument("this is no request of a replica that joins");
    }
    std::memcpy(&wanted, request.bytes.data(), sizeof(wanted));
    const auto now = Clock::now();
    asked_at_[request.connection_id] = now;
    if (!is_open_) throw std::invalid_argument("this replica does not hold the state of the group");
    const auto kind = static_cast<Kind>(wanted.kind);
    if (kind == Kind::kStatus) return status();
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

StateSource::Answer StateSource::status() {
    Answer answer;
    std::string standings, log;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& part : parts_) {
            if (part->num_writes.load(std::memory_order_acquire) % 2 == 0) continue;
            answer.found.kind = static_cast<uint32_t>(Kind::kLater);
            return answer;
        }
        standings = list_of(parts_, [](const auto& part) { return text_of(part->standing); });
    }
    {
        const std::lock_guard<std::mutex> lock(rounds_mutex_);
        log = list_of(order_, [&](const auto& key) { return rounds_.at(key).entry; });
    }
    answer.found.kind = static_cast<uint32_t>(Kind::kIsAt);
    answer.body = bytes_of("{\"fragments\":" + standings + ",\"log\":" + log +
                           ",\"num_newcomers\":" + std::to_string(num_askers(Clock::now())) + "}");
    return answer;
}

// Connections over which a replica has asked lately.
size_t StateSource::num_askers(Clock::time_point now) {
    for (auto it = asked_at_.begin(); it != asked_at_.end();) {
        it = now - it->second > kRecent ? asked_at_.erase(it) : std::next(it);
    }
    return asked_at_.size();
}

StateSource::Answer StateSource::state(const Wanted& wanted, Part& part) {
    const uint64_t most = std::max<uint64_t>(1, kMostBytes / (sizeof(float) * part.tensors.size()));
    const uint64_t begin = wanted.begin, end = wanted.end;
    if (begin >= end || end > part.num_elements || end - begin > most) {
        throw std::invalid_argument("fragment " + std::to_string(wanted.fragment) + " has " +
                                    std::to_string(part.num_elements) +
                                    " elements, and an answer has at most " + std::to_string(most) +
                                    ", got [" + std::to_string(begin) + ", " + std::to_string(end) +
                                    ")");
    }
    Answer answer;
    const uint64_t num_writes = part.num_writes.load(std::memory_order_acquire);
    Mark written;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        answer.found.standing = part.standing;
        written = part.written;
    }
    at::Tensor values;
    if (num_writes % 2 == 0) values = copy(part, written, begin, end);
    // A write, so that no read of the values moves behind the second look at the number.
    if (num_writes % 2 != 0 || part.num_writes.fetch_add(0) != num_writes) {
        answer.found.kind = static_cast<uint32_t>(Kind::kLater);
        return answer;
    }
    answer.found.digest = digest_of(values);
    const bool is_digest = wanted.kind == static_cast<uint32_t>(Kind::kDigest);
    answer.found.kind = static_cast<uint32_t>(is_digest ? Kind::kHashed : Kind::kElements);
    if (!is_digest) answer.body = values;
    return answer;
}

// fp32 [number of tensors, end - begin], in host memory.
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

StateSource::Answer StateSource::round(const Wanted& wanted) {
    if (wanted.end - wanted.begin > kMostBytes || wanted.begin >= wanted.end) {
        throw std::invalid_argument("an answer has 1 to " + std::to_string(kMostBytes) +
                                    " bytes of a round, got [" + std::to_string(wanted.begin) +
                                    ", " + std::to_string(wanted.end) + ")");
    }
    Answer answer;
    const std::lock_guard<std::mutex> lock(rounds_mutex_);
    const auto found = rounds_.find({wanted.fragment, wanted.number});
    if (found == rounds_.end() || wanted.end > found->second.num_bytes) {
        answer.found.kind = static_cast<uint32_t>(Kind::kGone);
        return answer;
    }
    if (found->second.copied) found->second.copied->synchronize();
    at::Tensor bytes = at::empty({static_cast<int64_t>(wanted.end - wanted.begin)}, at::kByte);
    uint64_t offset = 0;  // of a payload
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
    answer.found.kind = static_cast<uint32_t>(Kind::kPayloads);
    answer.found.digest = digest_of(bytes);
    answer.body = bytes;
    return answer;
}

}  // namespace diloco
