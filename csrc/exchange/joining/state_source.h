// The outer state of this replica and its latest rounds, for replicas that join.
//
// One thread answers: it copies a range while the training thread goes on, and gives the range up
// if an outer step was taken meanwhile. The training thread waits for the copy of a round's range
// at most, before the round's memory is used again.
#pragma once

#include <ATen/core/Tensor.h>
#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "exchange/device/device_queue.h"
#include "exchange/link/copies.h"

namespace diloco {

class StateSource {
  public:
    // Where the outer state of a fragment is: number of the next round, history, outer steps.
    struct Standing {
        uint64_t round = 0, history = 0, num_steps = 0;
    };

    // Bytes of state or of payloads in one answer.
    static constexpr uint64_t kMostBytes = 4 * 1024 * 1024;

    enum class Kind : uint32_t {
        // Requests.
        kStatus = 1,  // `number`: the last logged round that is known already, as a status said
        kState,       // elements [begin, end) of all tensors of a fragment
        kDigest,      // of the same
        kRound,       // bytes [begin, end) of the payloads of round `number`
        // Answers.
        kIsAt = 32,  // the body is JSON
        kElements,
        kHashed,
        kPayloads,
        kLater,   // an outer step was taken meanwhile: ask again
        kGone,    // the log does not have that round, or not any more
        kRefused  // the body is a sentence
    };

    // The layouts of a request and of the head of an answer, little endian.
    struct Wanted {
        uint32_t kind = 0, fragment = 0;
        uint64_t number = 0, begin = 0, end = 0;
    };
    struct Found {
        uint32_t kind = 0, reserved = 0;
        Standing standing{};
        uint64_t digest = 0;
    };
    static_assert(sizeof(Wanted) == 32 && sizeof(Found) == 40, "wire formats");

    // `parts`: by fragment, its tensors, fp32 of one size.
    explicit StateSource(std::vector<std::vector<at::Tensor>> parts);
    ~StateSource();
    // For a link. Its end waits for nothing.
    std::shared_ptr<link::Responder> responder() const;

    // The training thread. Between begin_write() and end_write() the state of a fragment changes.
    void begin_write(size_t fragment);
    void end_write(size_t fragment, const Standing& standing);
    // Keeps a round. `entry`: JSON that describes the round.
    void add(size_t fragment, uint64_t number, const std::string& entry,
             std::vector<at::Tensor> payloads);
    // After the return nobody reads the round's payloads.
    void remove(size_t fragment, uint64_t number);
    // From now on this replica holds the state of the group; before, it refuses every request.
    void open(const std::vector<Standing>& standings);

    // Bytes of state and payloads that were given to the link.
    int64_t served_bytes() const { return served_bytes_; }
    // Nothing answers any more.
    void close();

  private:
    struct Part {
        std::vector<at::Tensor> tensors{};
        uint64_t num_elements = 0;
        std::atomic<uint64_t> num_writes{0};  // odd while the state changes
        Standing standing{};                  // under the mutex
        Mark written{};                       // on a device; under the mutex
    };
    struct Round {
        std::string entry{};
        std::vector<at::Tensor> payloads{};
        uint64_t place = 0;  // among all rounds that were ever added
        uint64_t num_bytes = 0;
        Mark copied{};  // to the host
    };
    struct Result {
        Found found{};
        at::Tensor body{};
    };
    // The requests that wait, and the bodies that the link has not sent yet. Both may outlive their
    // source.
    struct UnderWay;

    void run();
    std::optional<link::Request> next(std::unique_lock<std::mutex>& lock);
    Result answer(const link::Request& request);
    Result result_of(const link::Request& request);
    Result status(const Wanted& wanted);
    Result state(const Wanted& wanted, Part& part);
    Result round(const Wanted& wanted);
    at::Tensor copy(Part& part, const Mark& written, uint64_t begin, uint64_t end) const;
    size_t num_askers(link::Clock::time_point now);

    std::vector<std::unique_ptr<Part>> parts_;
    std::unordered_map<c10::Device, std::unique_ptr<OwnStream>> streams_{};
    const std::shared_ptr<UnderWay> under_way_;
    std::mutex rounds_mutex_;
    std::map<std::pair<size_t, uint64_t>, Round> rounds_{};  // by fragment and number
    uint64_t num_added_ = 0;
    std::mutex mutex_;  // of the standings
    std::atomic<bool> is_open_{false};
    std::atomic<int64_t> served_bytes_{0};
    using Asker = std::pair<link::Clock::time_point, std::weak_ptr<link::Connection>>;
    std::map<uint64_t, Asker> asked_at_{};  // by connection
    const pid_t pid_;
    std::thread thread_;
};

}  // namespace diloco
