// The streams and events of the device that lags: threads that run what is enqueued on them, in
// order, after random pauses; and the record of what was enqueued and of what the host waited for.
// Included by lagging_device.cpp alone.
#pragma once

#include <c10/core/Stream.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace lagging {

using c10::StreamId;

inline std::atomic<int64_t> lag_us{0};

struct Record {
    std::mutex mutex;
    std::vector<std::string> waits;
    std::vector<std::string> tasks;
    std::vector<std::string> devices;
};

inline Record& record() {
    static auto* one = new Record;
    return *one;
}

inline std::string this_thread() {
    char name[16] = {};
    pthread_getname_np(pthread_self(), name, sizeof(name));
    return name;
}

inline void note_wait(const std::string& what) {
    std::lock_guard<std::mutex> lock(record().mutex);
    record().waits.push_back(what + " in " + this_thread());
}

inline void note_device(int device) {
    std::lock_guard<std::mutex> lock(record().mutex);
    record().devices.push_back(std::to_string(device) + " in " + this_thread());
}

class Lane {
  public:
    explicit Lane(StreamId id) : id_(id), random_(static_cast<unsigned>(id) + 1) {
        std::thread([this] { loop(); }).detach();
    }

    void enqueue(std::string name, std::function<void()> task) {
        {
            std::lock_guard<std::mutex> lock(record().mutex);
            record().tasks.push_back(std::to_string(id_) + " " + name);
        }
        std::lock_guard<std::mutex> lock(mutex_);
        tasks_.push_back(std::move(task));
        ++num_enqueued_;
        changed_.notify_all();
    }

    void synchronize() {
        std::unique_lock<std::mutex> lock(mutex_);
        const uint64_t goal = num_enqueued_;
        changed_.wait(lock, [&] { return num_done_ >= goal; });
    }

    bool is_idle() {
        std::lock_guard<std::mutex> lock(mutex_);
        return num_done_ == num_enqueued_;
    }

  private:
    void loop() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            changed_.wait(lock, [this] { return !tasks_.empty(); });
            const auto task = std::move(tasks_.front());
            tasks_.pop_front();
            lock.unlock();
            if (const int64_t most = lag_us.load()) {
                const auto pause = static_cast<int64_t>(random_() % static_cast<uint64_t>(most));
                std::this_thread::sleep_for(std::chrono::microseconds(pause));
            }
            try {
                task();
            } catch (const std::exception& error) {
                // As a GPU does not survive a fault; the test sees its process die.
                std::fprintf(stderr, "lagging device: %s\n", error.what());
                std::abort();
            }
            lock.lock();
            ++num_done_;
            changed_.notify_all();
        }
    }

    const StreamId id_;
    std::minstd_rand random_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> tasks_;
    uint64_t num_enqueued_ = 0;
    uint64_t num_done_ = 0;
};

struct Lanes {
    std::mutex mutex;
    std::map<StreamId, Lane*> by_id;
    StreamId next = 2;
};

inline Lanes& lanes() {
    static auto* all = new Lanes;
    return *all;
}

inline Lane& lane(StreamId id) {
    std::lock_guard<std::mutex> lock(lanes().mutex);
    Lane*& one = lanes().by_id[id];
    if (one == nullptr) one = new Lane(id);
    return *one;
}

// Two devices. Streams are numbered through, those that torch gives by default first.
constexpr int kNumDevices = 2;
inline thread_local int current_device = 0;
inline thread_local std::array<StreamId, kNumDevices> current{0, 1};

inline void synchronize_all() {
    std::vector<Lane*> all;
    {
        std::lock_guard<std::mutex> lock(lanes().mutex);
        for (const auto& [id, one] : lanes().by_id) all.push_back(one);
    }
    for (Lane* one : all) one->synchronize();
}

struct Point {
    static inline std::atomic<int64_t> next{0};
    const int64_t number = next++;
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t recorded = 0;
    uint64_t reached = 0;
    std::chrono::steady_clock::time_point at;
};
using PointPtr = std::shared_ptr<Point>;

inline std::string name_of(const Point& point, uint64_t version) {
    return std::to_string(point.number) + "." + std::to_string(version);
}

inline void record_point(const PointPtr& point, StreamId stream) {
    uint64_t version = 0;
    {
        std::lock_guard<std::mutex> lock(point->mutex);
        version = ++point->recorded;
    }
    lane(stream).enqueue("record " + name_of(*point, version), [point, version] {
        std::lock_guard<std::mutex> lock(point->mutex);
        point->reached = std::max(point->reached, version);
        point->at = std::chrono::steady_clock::now();
        point->changed.notify_all();
    });
}

inline void wait_for(const PointPtr& point, uint64_t version) {
    std::unique_lock<std::mutex> lock(point->mutex);
    point->changed.wait(lock, [&] { return point->reached >= version; });
}

}  // namespace lagging
