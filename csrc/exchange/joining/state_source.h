// Serves the outer state of this replica, and the payloads of its latest rounds, to replicas that
// join.
//
// A thread answers the requests. It copies a range of the state while the training thread goes on;
// if an outer step changes the fragment meanwhile, the copy is dropped and the asker is told to ask
// again. The training thread waits only in add() and remove(), while a part of a round's payloads
// is copied.
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
    // How far the outer state of a fragment is: the number of its next round, its history, and the
    // number of its outer steps.
    struct Standing {
        uint64_t round = 0, history = 0, num_steps = 0;
    };

    // The most bytes of state or of payloads in one answer.
    static constexpr uint64_t kMostBytes = 4 * 1024 * 1024;

    enum class Kind : uint32_t {
        // Requests.
        kStatus = 1,  // how far all fragments are, and the rounds logged after number `number`,
                      // which is the "last" of an earlier status
        kState,       // elements [begin, end) of all tensors of a fragment
        kDigest,      // the digest of these elements, without the elements
        kRound,       // bytes [begin, end) of the payloads of round `number`
        // Answers.
        kIsAt = 32,  // to kStatus; the body is JSON
        kElements,   // to kState
        kHashed,     // to kDigest
        kPayloads,   // to kRound
        kLater,      // an outer step was taken meanwhile: ask again
        kGone,       // the log does not have that round, or not any more
        kRefused     // the body is a sentence that says why
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

    // `parts` has the tensors of each fragment: contiguous fp32 tensors of one size.
    explicit StateSource(std::vector<std::vector<at::Tensor>> parts);
    ~StateSource();
    // The responder for Link::set_responder(). Its destructor never waits.
    std::shared_ptr<link::Responder> responder() const;

    // The training thread calls the functions below. Between begin_write() and end_write() the
    // state of a fragment changes.
    void begin_write(size_t fragment);
    void end_write(size_t fragment, const Standing& standing);
    // Adds a round to the log. `entry` is JSON that describes the round.
    void add(size_t fragment, uint64_t number, const std::string& entry,
             std::vector<at::Tensor> payloads);
    // Removes a round from the log. After the return nobody reads the round's payloads.
    void remove(size_t fragment, uint64_t number);
    // Begins to answer: this replica holds the state of the group now. Before this call every
    // request is refused.
    void open(const std::vector<Standing>& standings);

    // The number of bytes of state and payloads that were given to the link.
    int64_t served_bytes() const { return served_bytes_; }
    // Ends the thread; requests that still wait get an empty answer.
    void close();

  private:
    // One fragment.
    struct Part {
        std::vector<at::Tensor> tensors{};
        uint64_t num_elements = 0;
        std::atomic<uint64_t> num_writes{0};  // odd while the state changes
        Standing standing{};                  // guarded by mutex_
        Mark written{};  // reached when the device has written the state; guarded by mutex_
    };
    struct Round {
        std::string entry{};
        std::vector<at::Tensor> payloads{};
        uint64_t place = 0;  // counts all rounds that were ever added, from 1
        uint64_t num_bytes = 0;
        Mark copied{};  // reached when the payloads are in host memory
    };
    struct Result {
        Found found{};
        at::Tensor body{};
    };
    // The waiting requests, and the bodies that the link has not sent yet. The link may hold this
    // object after its StateSource is gone.
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
    std::mutex mutex_;  // guards the standings
    std::atomic<bool> is_open_{false};
    std::atomic<int64_t> served_bytes_{0};
    using Asker = std::pair<link::Clock::time_point, std::weak_ptr<link::Connection>>;
    std::map<uint64_t, Asker> asked_at_{};  // the last request of each connection, by its id
    const pid_t pid_;
    std::thread thread_;
};

}  // namespace diloco
