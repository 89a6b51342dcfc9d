// A call of a CUDA operator with its device and stream, and the kernel parameters that are made
// from checked tensors. Only cuda.cpp includes this file.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <vector>

#include "cuda/kernels.h"
#include "operators/checks.h"

#if !defined(DILOCO_EMULATED)
// A function of torch's stable C interface, in libtorch_cuda. Its address is null if torch was
// built without CUDA. Returns zero on success.
extern "C" __attribute__((weak, visibility("default"))) int32_t
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#endif

namespace diloco {
namespace {

#if defined(DILOCO_EMULATED)
constexpr const char* kImpl = "emulated";

void* current_stream(c10::Device) { return nullptr; }
#else
constexpr const char* kImpl = "cuda";

void* current_stream(c10::Device device) {
    void* stream = nullptr;
    TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr &&
                    aoti_torch_get_current_cuda_stream(device.index(), &stream) == 0,
                "this torch does not hand out its current stream of ", device);
    return stream;
}
#endif

// Returns whether the kernels run on a device (1 or 0), then the numbers of cuda::support(), from
// which diloco_comm/ops/implementations.py makes a sentence. The driver is asked once for each
// device.
const std::vector<int64_t>& support_of(int64_t device) {
    static std::mutex mutex;
    static std::map<int64_t, std::vector<int64_t>> known;
    const std::lock_guard<std::mutex> lock(mutex);
    std::vector<int64_t>& found = known[device];
    if (!found.empty()) return found;
    found = cuda::support(static_cast<int>(device));
    const int64_t arch = found[2];
    // Machine code also runs on devices with a higher minor version of the same architecture. Later
    // architectures compile the PTX of the last one.
    const bool runs = std::any_of(found.begin() + 3, found.end(), [&](int64_t each) {
        return arch / 100 == each / 100 && arch >= each;
    });
    found.insert(found.begin(), runs || arch > found.back());
    return found;
}

// Thrown by a call with an empty `impl`, if the kernels do not run on the device: Triton is used
// then.
struct Unserved {};

// One call of an operator: its device and stream, and device memory for lists that are too long for
// the kernel's parameters. The memory comes from the caching allocator, in the order of the stream.
class Call {
  public:
    // With an empty `impl` the caller leaves the choice to the dispatcher, which has chosen this
    // code by the tensors' device. The table of defaults (diloco_comm/ops/implementations.py) was
    // asked before: by diloco_comm.ops, and for the engine's encode by
    // diloco_comm/exchange/exchange.py.
    Call(c10::string_view impl, const Tensor& tensor) : device(tensor.device()), guard_(device) {
        TORCH_CHECK_VALUE(impl.empty() || impl == kImpl, "impl '", impl,
                          "' does not run on tensors of ", device, "; available: ", kImpl);
        const bool runs = support_of(device.index()).front() != 0;
        if (impl.empty() && !runs) throw Unserved();
        TORCH_CHECK_VALUE(runs, "impl '", impl,
                          "' does not run here: `diloco-comm doctor` says why");
        queue_ = {device.index(), current_stream(device)};
    }

    // The queue for a kernel of at most `max_blocks` thread blocks; 0 means no limit.
    cuda::Queue queue(int64_t max_blocks = 0) const {
        cuda::Queue queue = queue_;
        queue.max_blocks = max_blocks;
        return queue;
    }

    // Device memory that is freed at the end of the call. Kernels that are enqueued before may
    // still use it, because the allocator gives it only to later work of the same stream.
    void* scratch(int64_t num_bytes) {
        const auto options = at::TensorOptions().device(device).dtype(at::kByte);
        scratch_.push_back(at::empty({std::max<int64_t>(num_bytes, 1)}, options));
        return scratch_.back().data_ptr();
    }

    template <class T>
    const T* uploaded(const std::vector<T>& list) {
        TORCH_INTERNAL_ASSERT(list.size() * sizeof(T) % 16 == 0);
        void* memory = scratch(static_cast<int64_t>(list.size() * sizeof(T)));
        cuda::upload(memory, list.data(), list.size() * sizeof(T), queue_);
        return static_cast<const T*>(memory);
    }

    const c10::Device device;

  private:
    c10::DeviceGuard guard_;
    cuda::Queue queue_{};
    std::vector<Tensor> scratch_;
};

// Divides elements [begin, end) into tiles of `tile` elements; on a sparse wire a tile is a block.
// A warp gets up to `most` tiles, if there are still enough warps to fill a device several times.
cuda::Runs runs_of(const codec::RunLayout& layout, int64_t begin, int64_t end, int64_t tile,
                   uint32_t most = 1) {
    constexpr int64_t kEnoughWarps = 16384;
    if (wire::is_sparse(layout.format)) tile = cuda::kSparseTile;
    const auto tiles_of = [&](int64_t elements) { return (elements + tile - 1) / tile; };
    cuda::Runs runs{};
    runs.begin = begin;
    runs.end = end;
    runs.run_elements = layout.run_elements;
    runs.first_run = begin / layout.run_elements;
    runs.run_bytes = run_bytes(layout);
    runs.code_offset = wire::code_offset(layout.format, layout.run_elements, layout.block_size);
    runs.block_size = layout.block_size;
    while ((1 << runs.block_shift) < layout.block_size) ++runs.block_shift;
    if (wire::is_sparse(layout.format)) {
        while ((1 << runs.log_kept) < wire::num_kept(layout.format)) ++runs.log_kept;
    }
    const int64_t per_run = tiles_of(std::min(layout.run_elements, std::max<int64_t>(end, 1)));
    const int64_t whole = (end - begin) / layout.run_elements;
    const int64_t num_tiles = whole * per_run + tiles_of((end - begin) % layout.run_elements);
    TORCH_CHECK_VALUE(num_tiles <= std::numeric_limits<int32_t>::max() - 1024, "[begin, end) = [",
                      begin, ", ", end, ") in runs of ", layout.run_elements,
                      " elements is more than one call can do");
    runs.tiles_per_run = static_cast<uint32_t>(per_run);
    runs.num_tiles = static_cast<uint32_t>(num_tiles);
    runs.tiles_per_warp = 1;
    while (2 * runs.tiles_per_warp <= most &&
           num_tiles / (2 * runs.tiles_per_warp) >= kEnoughWarps) {
        runs.tiles_per_warp *= 2;
    }
    return runs;
}

// A single run with all elements of the fragment, for the operators that have no wire format.
cuda::Runs one_run(int64_t num_elements) {
    constexpr int64_t kBlock = codec::kPlainBlock;
    const int64_t rounded = std::max<int64_t>((num_elements + kBlock - 1) / kBlock, 1) * kBlock;
    return runs_of({Format::kFp32, codec::kPlainBlock, rounded}, 0, num_elements, cuda::kStepTile);
}

// Sets `to` to the tensors that have elements of [begin, end). The returned list of them is valid
// until the next call on this thread.
using SegmentList = std::vector<cuda::Segment>;
const SegmentList& set_segments(Call& call, cuda::Segments& to, const codec::Fragment& fragment,
                                int64_t begin, int64_t end) {
    static thread_local SegmentList list;
    list.clear();
    for (int64_t i = 0; i < fragment.num_segments; ++i) {
        const codec::Segment& each = fragment.segments[i];
        if (each.size == 0 || each.begin >= end || each.begin + each.size <= begin) continue;
        list.push_back(cuda::Segment::of(each.data, each.dtype, each.begin));
    }
    to.count = static_cast<int32_t>(list.size());
    list.push_back(cuda::Segment::of(nullptr, DType::kFp32, end));
    to.in_memory = nullptr;
    if (to.count <= cuda::kInlineSegments) {
        std::copy(list.begin(), list.end(), to.inlined);
    } else {
        to.in_memory = call.uploaded(list);
    }
    return list;
}

// Collects the ranges of tiles that are not whole (cuda/tiles.h), in order.
class RestList {
  public:
    RestList(const cuda::Runs& runs, int64_t tile) : runs_(runs), tile_(tile) {}

    // Adds the tiles of a tensor if it is misaligned. Else adds the tile in which the tensor
    // begins, unless it begins with a tile.
    void add_tensor(const cuda::Segment& tensor, int64_t begin, int64_t end) {
        const int64_t first = tile_of(begin);
        const uint64_t quad = dtype_of(tensor) == DType::kFp32 ? 16 : 8;
        if (tensor.origin % quad != 0) {
            add(first, tile_of(end - 1));
        } else if ((begin - runs_.begin) % runs_.run_elements % tile_ != 0) {
            add(first, first);
        }
    }

    // Adds the tiles that the end of a run cuts short, as far as they come before tile `before`.
    void add_cuts(int64_t before) {
        const int64_t size = runs_.end - runs_.begin;
        // Complete runs cut no tile if their length is a multiple of the tile's.
        if (runs_.run_elements % tile_ == 0) {
            next_run_ = std::max(next_run_, size / runs_.run_elements);
        }
        for (; next_run_ * runs_.run_elements < size; ++next_run_) {
            const int64_t of_run =
                std::min(runs_.run_elements, size - next_run_ * runs_.run_elements);
            const int64_t last = next_run_ * runs_.tiles_per_run + of_run / tile_;
            if (last >= before) return;
            if (of_run % tile_ != 0) insert(last, last);
        }
    }

    std::vector<cuda::TileRange>& ranges() { return ranges_; }
    int64_t num_tiles() const { return num_tiles_; }

  private:
    int64_t tile_of(int64_t element) const {
        const int64_t within = element - runs_.begin, run = within / runs_.run_elements;
        return run * runs_.tiles_per_run + (within - run * runs_.run_elements) / tile_;
    }
    void add(int64_t first, int64_t last) {
        add_cuts(first);
        insert(first, last);
    }
    void insert(int64_t first, int64_t last) {
        first = std::max(first, end_);
        if (last < first) return;
        if (first > end_ || ranges_.empty()) {
            ranges_.push_back({static_cast<uint32_t>(first), static_cast<uint32_t>(num_tiles_)});
        }
        num_tiles_ += last + 1 - first;
        end_ = last + 1;
    }

    const cuda::Runs& runs_;
    const int64_t tile_;
    std::vector<cuda::TileRange> ranges_;
    int64_t num_tiles_ = 0, end_ = 0, next_run_ = 0;
};

// Sets `to` to the tiles of `runs` that are left for the second launch (cuda/tiles.h). The elements
// are in `tensors`, or only in payloads. Without has_whole no tile can be whole, so all are left.
void set_rest(Call& call, cuda::Rest& to, const cuda::Runs& runs, int64_t tile, bool has_whole,
              const SegmentList& tensors = {}) {
    RestList list(runs, tile);
    for (size_t i = 0; has_whole && i + 1 < tensors.size(); ++i) {
        list.add_tensor(tensors[i], std::max(begin_of(tensors[i]), runs.begin),
                        begin_of(tensors[i + 1]));
    }
    if (has_whole) list.add_cuts(std::numeric_limits<int64_t>::max());
    to.is_all = !has_whole || list.num_tiles() == runs.num_tiles;
    to.num_tiles = to.is_all ? runs.num_tiles : static_cast<uint32_t>(list.num_tiles());
    to.tiles_per_warp = to.is_all ? runs.tiles_per_warp : 1;
    to.count = static_cast<int32_t>(list.ranges().size());
    to.in_memory = nullptr;
    if (to.is_all) return;
    if (to.count <= cuda::kInlineSegments) {
        std::copy(list.ranges().begin(), list.ranges().end(), to.inlined);
    } else {
        if (to.count % 2 != 0) list.ranges().push_back({});  // a multiple of 16 bytes is uploaded
        to.in_memory = call.uploaded(list.ranges());
    }
}

// log2 of the coefficients, if reduce can use dot products (cuda/dot_tile.h): all coefficients
// equal the same power of two from 2^-7 to 1, and their number is one that dot products take.
// Else 1.
int32_t dot_exponent(const TermList& terms) {
    if (terms.count % cuda::kDotTerms != 0 || terms.count > cuda::kMostDotTerms) return 1;
    int exponent = 0;
    const float first = terms.coefficients[0];
    for (int i = 1; i < terms.count; ++i) {
        if (terms.coefficients[i] != first) return 1;
    }
    if (std::frexp(first, &exponent) != 0.5f) return 1;
    return exponent >= -6 && exponent <= 1 ? exponent - 1 : 1;
}

void set_terms(Call& call, cuda::Terms& to, const TermList& terms) {
    static thread_local std::vector<cuda::Term> list;
    list.clear();
    to.are_aligned = true;
    for (int i = 0; i < terms.count; ++i) {
        list.push_back({terms.payloads[i], terms.coefficients[i]});
        const auto address = reinterpret_cast<uint64_t>(terms.payloads[i]);
        to.are_aligned = to.are_aligned && address % wire::kAlignment == 0;
    }
    to.dot_exponent = 1;
    to.count = terms.count;
    to.in_memory = nullptr;
    if (to.count <= cuda::kInlineTerms) {
        std::copy(list.begin(), list.end(), to.inlined);
    } else {
        to.in_memory = call.uploaded(list);
    }
}

}  // namespace
}  // namespace diloco
