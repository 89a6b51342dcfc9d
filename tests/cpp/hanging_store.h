// A store whose host can hang: every call then waits until it wakes up.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include "local_store.h"

namespace diloco_test {

class HangingStore : public LocalStore {
  public:
    ~HangingStore() override { wake(); }

    void hang() {
        std::lock_guard<std::mutex> lock(mutex_);
        is_hanging_ = true;
    }
    void wake() {
        std::lock_guard<std::mutex> lock(mutex_);
        is_hanging_ = false;
        changed_.notify_all();
    }
    int num_waiting() {
        std::lock_guard<std::mutex> lock(mutex_);
        return num_waiting_;
    }

    void set(const std::string& key, const Bytes& value) override {
        answer();
        LocalStore::set(key, value);
    }
    Bytes get(const std::string& key) override {
        answer();
        return LocalStore::get(key);
    }
    Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
        answer();
        return LocalStore::compareSet(key, expected, desired);
    }
    bool check(const std::vector<std::string>& keys) override {
        answer();
        return LocalStore::check(keys);
    }

  private:
    void answer() {
        std::unique_lock<std::mutex> lock(mutex_);
        ++num_waiting_;
        changed_.wait(lock, [this] { return !is_hanging_; });
        --num_waiting_;
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_hanging_ = false;
    int num_waiting_ = 0;
};

}  // namespace diloco_test
