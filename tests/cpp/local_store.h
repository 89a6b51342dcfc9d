// A c10d store in this process; unlike torch's HashStore, sanitizers see its mutex.
#pragma once

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace diloco_test {

class LocalStore : public c10d::Store {
  public:
    using Bytes = std::vector<uint8_t>;

    c10::intrusive_ptr<Store> clone() override { throw std::runtime_error("not used"); }
    void set(const std::string& key, const Bytes& value) override {
        std::lock_guard<std::mutex> lock(mutex_);
        values_[key] = value;
    }
    Bytes get(const std::string& key) override {
        std::lock_guard<std::mutex> lock(mutex_);
        return values_.at(key);
    }
    Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto found = values_.find(key);
        if (found == values_.end()) {
            if (!expected.empty()) return expected;
            return values_[key] = desired;
        }
        if (found->second == expected) found->second = desired;
        return found->second;
    }
    bool check(const std::vector<std::string>& keys) override {
        std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& key : keys) {
            if (values_.count(key) == 0) return false;
        }
        return true;
    }
    int64_t add(const std::string&, int64_t) override { throw std::runtime_error("not used"); }
    bool deleteKey(const std::string&) override { throw std::runtime_error("not used"); }
    int64_t getNumKeys() override { throw std::runtime_error("not used"); }
    void wait(const std::vector<std::string>&) override { throw std::runtime_error("not used"); }
    void wait(const std::vector<std::string>&, const std::chrono::milliseconds&) override {
        throw std::runtime_error("not used");
    }

  private:
    std::mutex mutex_;
    std::map<std::string, Bytes> values_;
};

}  // namespace diloco_test
