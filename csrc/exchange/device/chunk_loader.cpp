#include "exchange/device/chunk_loader.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace diloco {

ChunkLoader::ChunkLoader(c10::Device device) : device_(device), loads_(device), stores_(device) {}

void ChunkLoader::grow(const std::vector<at::Tensor>& hosts, int64_t count) {
    const auto fits = [&](const Buffers& buffers) {
        return buffers.tensors.size() >= hosts.size() && buffers.tensors[0].numel() >= count;
    };
    if (fits(buffers_[0])) return;
    const auto here = caller_stream(device_);
    for (Buffers& buffers : buffers_) {
        // The old buffers are freed on the caller's stream, which must first wait for their last
        // use.
        if (buffers.free) buffers.free->block(here);
        const size_t num = std::max(hosts.size(), buffers.tensors.size());
        const int64_t size =
            buffers.tensors.empty() ? count : std::max(count, buffers.tensors[0].numel());
        buffers.tensors.clear();
        for (size_t i = 0; i < num; ++i) {
            buffers.tensors.push_back(at::empty({size}, hosts[0].options().device(device_)));
        }
        buffers.free = mark_stream(here);
    }
}

std::vector<at::Tensor> ChunkLoader::load(const std::vector<at::Tensor>& hosts, int64_t begin,
                                          int64_t end) {
    TORCH_CHECK_VALUE(!hosts.empty() && 0 <= begin && begin < end && end <= hosts[0].numel(),
                      "load: a range of the tensors is expected, got [", begin, ", ", end, ")");
    grow(hosts, end - begin);
    Buffers& buffers = buffers_[next_];
    buffers.free->block(loads_.get());
    // Ranges of one pass do not overlap, so that a load need not wait for the pass's own stores.
    // The first load of a new pass waits for all stores before it.
    const void* first = hosts[0].data_ptr();
    if (written_ && (first != last_ || begin < last_end_)) written_->block(loads_.get());
    last_ = first;
    last_end_ = end;
    std::vector<at::Tensor> windows;
    for (size_t i = 0; i < hosts.size(); ++i) {
        windows.push_back(buffers.tensors[i].narrow(0, 0, end - begin));
        copy_on(loads_.get(), windows.back(), hosts[i].narrow(0, begin, end - begin));
    }
    mark_stream(loads_.get())->block(caller_stream(device_));
    return windows;
}

void ChunkLoader::release(const std::vector<at::Tensor>& hosts, int64_t begin, int64_t end,
                          bool is_written) {
    Buffers& buffers = buffers_[next_];
    next_ = 1 - next_;
    buffers.free = mark_stream(caller_stream(device_));
    if (!is_written) return;
    buffers.free->block(stores_.get());
    for (size_t i = 0; i < hosts.size(); ++i) {
        copy_on(stores_.get(), hosts[i].narrow(0, begin, end - begin),
                buffers.tensors[i].narrow(0, 0, end - begin));
    }
    buffers.free = written_ = mark_stream(stores_.get());
}

void ChunkLoader::finish() const {
    for (const Buffers& buffers : buffers_) {
        if (buffers.free) buffers.free->synchronize();
    }
    if (written_) written_->synchronize();
}

}  // namespace diloco
