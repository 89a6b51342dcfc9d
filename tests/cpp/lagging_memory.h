// The memory of the device that lags, and page-locked memory of the host. Included by
// lagging_device.cpp alone.
#pragma once

#include <c10/core/Allocator.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "lagging_streams.h"

namespace lagging {

constexpr auto kType = c10::DeviceType::PrivateUse1;
inline std::atomic<int64_t> num_allocations{0};

// Memory that an allocator has given out and not taken back.
class Blocks {
  public:
    void add(const void* memory, size_t num_bytes) {
        std::lock_guard<std::mutex> lock(mutex_);
        blocks_[static_cast<const char*>(memory)] = num_bytes;
    }
    void remove(const void* memory) {
        std::lock_guard<std::mutex> lock(mutex_);
        blocks_.erase(static_cast<const char*>(memory));
    }
    bool have(const void* data, size_t num_bytes) {
        const auto* at = static_cast<const char*>(data);
        std::lock_guard<std::mutex> lock(mutex_);
        auto next = blocks_.upper_bound(at);
        if (next == blocks_.begin()) return false;
        --next;
        return at + num_bytes <= next->first + next->second;
    }

  private:
    std::mutex mutex_;
    std::map<const char*, size_t> blocks_;
};

inline Blocks& device_blocks() {
    static auto* one = new Blocks;
    return *one;
}

inline Blocks& pinned() {
    static auto* one = new Blocks;
    return *one;
}

struct Block {
    void* memory;
    size_t num_bytes;
    StreamId stream;
    std::set<StreamId> users;
};

// As the caching allocator: the memory is the allocating stream's again, in its own order, when the
// other streams that were named are done with it.
inline void free_block(void* context) {
    auto* block = static_cast<Block*>(context);
    device_blocks().remove(block->memory);
    for (const StreamId user : block->users) {
        auto point = std::make_shared<Point>();
        record_point(point, user);
        lane(block->stream).enqueue("wait " + name_of(*point, 1), [point] { wait_for(point, 1); });
    }
    lane(block->stream).enqueue("free", [block] {
        std::memset(block->memory, 0xcd, block->num_bytes);
        std::free(block->memory);
        delete block;
    });
}

class DeviceAllocator final : public c10::Allocator {
  public:
    c10::DataPtr allocate(size_t num_bytes) override {
        ++num_allocations;
        void* memory = nullptr;
        if (posix_memalign(&memory, 64, std::max<size_t>(num_bytes, 64)) != 0) std::abort();
        const int device = current_device;
        device_blocks().add(memory, num_bytes);
        auto* block = new Block{memory, num_bytes, current[device], {}};
        return {memory, block, &free_block, c10::Device(kType, device)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void* to, const void* from, size_t count) const override {
        std::memcpy(to, from, count);
    }
};

inline bool is_pinned(const void* data) { return pinned().have(data, 1); }

class PinnedAllocator final : public c10::Allocator {
  public:
    c10::DataPtr allocate(size_t num_bytes) override {
        void* memory = nullptr;
        if (posix_memalign(&memory, 64, std::max<size_t>(num_bytes, 64)) != 0) std::abort();
        pinned().add(memory, num_bytes);
        return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, size_t count) const override {
        std::memcpy(to, from, count);
    }

  private:
    static void release(void* memory) {
        pinned().remove(memory);
        std::free(memory);
    }
};

inline PinnedAllocator pinned_allocator;

}  // namespace lagging
