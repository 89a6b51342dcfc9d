// The plain loops of codec/bench/floors.h over the class Vec of vec_avx2.h or vec_avx512.h,
// whichever is included before. Most loops that write exist with ordinary and with non-temporal
// stores ("_stream"): a benchmark takes the faster one.
#pragma once

#include <cstring>

#include "codec/bench/floors.h"

namespace diloco::codec {
namespace {

template <int kBuffer>
float* floor_at(const FloorBuffer* b, size_t i) {
    return reinterpret_cast<float*>(b[kBuffer].data) + i;
}

Vec::I load_bits(const float* p) { return Vec::as_int(Vec::load(p)); }

template <bool kStreams>
void store_or_stream(float* p, Vec::F v) {
    kStreams ? Vec::stream(p, v) : Vec::store(p, v);
}

// Stores the first 32 bytes of a vector as if they were codes.
template <bool kStreams>
void store_lower(uint8_t* p, Vec::I v) {
    __m256i bytes;
    std::memcpy(&bytes, &v, sizeof(bytes));
    auto* target = reinterpret_cast<__m256i*>(p);
    kStreams ? _mm256_stream_si256(target, bytes) : _mm256_storeu_si256(target, bytes);
}

void floor_copy(const FloorBuffer* b, size_t begin, size_t end) {
    std::memcpy(floor_at<1>(b, begin), floor_at<0>(b, begin), sizeof(float) * (end - begin));
}

void floor_read2(const FloorBuffer* b, size_t begin, size_t end) {
    Vec::I sums[4] = {Vec::set(0), Vec::set(0), Vec::set(0), Vec::set(0)};
    for (size_t i = begin; i < end; i += 4 * Vec::kWidth) {
        for (int k = 0; k < 4; ++k) {
            const size_t at = i + k * Vec::kWidth;
            sums[k] = Vec::add(
                sums[k], Vec::xor_(load_bits(floor_at<0>(b, at)), load_bits(floor_at<1>(b, at))));
        }
    }
    // The volatile variable keeps the compiler from removing the loads.
    volatile uint32_t sink =
        Vec::sum(Vec::add(Vec::add(sums[0], sums[1]), Vec::add(sums[2], sums[3])));
    static_cast<void>(sink);
}

template <bool kStreams>
void floor_decode(const FloorBuffer* b, size_t begin, size_t end) {
    for (size_t i = begin; i < end; i += Vec::kWidth) {
        store_or_stream<kStreams>(floor_at<1>(b, i), Vec::to_float(Vec::load_i8(b[0].data + i)));
    }
    _mm_sfence();
}

// The codes are made by few instructions, so that the memory alone limits the speed.
template <bool kStreams>
void floor_encode(const FloorBuffer* b, size_t begin, size_t end) {
    for (size_t i = begin; i < end; i += 32) {
        Vec::I sum = Vec::set(0);
        for (size_t at = i; at < i + 32; at += Vec::kWidth) {
            sum = Vec::add(sum,
                           Vec::xor_(load_bits(floor_at<0>(b, at)), load_bits(floor_at<1>(b, at))));
        }
        store_lower<kStreams>(b[2].data + i, sum);
    }
    _mm_sfence();
}

// kStreams: 0: no store is non-temporal; 1: the parameters' are; 2: all are.
template <int kStreams>
void floor_step(const FloorBuffer* b, size_t begin, size_t end) {
    for (size_t i = begin; i < end; i += Vec::kWidth) {
        const Vec::F g = Vec::to_float(Vec::load_i8(b[3].data + i));
        const Vec::F outer = Vec::add(Vec::load(floor_at<0>(b, i)), g);
        store_or_stream<kStreams == 2>(floor_at<1>(b, i),
                                       Vec::add(Vec::load(floor_at<1>(b, i)), g));
        store_or_stream<kStreams == 2>(floor_at<0>(b, i), outer);
        store_or_stream<kStreams >= 1>(floor_at<2>(b, i), outer);
    }
    _mm_sfence();
}

// The outer step as the kernel takes it: the codes of 256 elements first, then the other streams.
void floor_step_burst(const FloorBuffer* b, size_t begin, size_t end) {
    alignas(64) float g[256];
    for (size_t first = begin; first < end; first += 256) {
        for (int k = 0; k < 256; k += Vec::kWidth) {
            Vec::store(g + k, Vec::to_float(Vec::load_i8(b[3].data + first + k)));
        }
        for (int k = 0; k < 256; k += Vec::kWidth) {
            const size_t i = first + k;
            const Vec::F outer = Vec::add(Vec::load(floor_at<0>(b, i)), Vec::load(g + k));
            const Vec::F momentum = Vec::add(Vec::load(floor_at<1>(b, i)), Vec::load(g + k));
            Vec::store(floor_at<1>(b, i), momentum);
            Vec::store(floor_at<0>(b, i), outer);
            Vec::stream(floor_at<2>(b, i), outer);
        }
    }
    _mm_sfence();
}

// An arrival at the asynchronous server: no parameters are written.
void floor_arrival(const FloorBuffer* b, size_t begin, size_t end) {
    for (size_t i = begin; i < end; i += Vec::kWidth) {
        const Vec::F g = Vec::to_float(Vec::load_i8(b[2].data + i));
        Vec::store(floor_at<1>(b, i), Vec::add(Vec::load(floor_at<1>(b, i)), g));
        Vec::store(floor_at<0>(b, i), Vec::add(Vec::load(floor_at<0>(b, i)), g));
    }
}

// The residual is stored vector by vector, and codes as soon as there are 32 bytes of them.
template <bool kStreams>
void floor_feedback(const FloorBuffer* b, size_t begin, size_t end) {
    for (size_t i = begin; i < end; i += 32) {
        Vec::F y = Vec::zero();
        for (size_t at = i; at < i + 32; at += Vec::kWidth) {
            y = Vec::sub(Vec::load(floor_at<0>(b, at)), Vec::load(floor_at<1>(b, at)));
            y = Vec::add(y, Vec::load(floor_at<2>(b, at)));
            store_or_stream<kStreams>(floor_at<3>(b, at), y);
        }
        store_lower<kStreams>(b[4].data + i, Vec::as_int(y));
    }
    _mm_sfence();
}

constexpr Floor kFloors[] = {
    {"memcpy", kCopyBuffers, 2, {4, 4}, floor_copy},
    {"read2", kReadBuffers, 2, {4, 4}, floor_read2},
    {"decode", kDecodeBuffers, 2, {1, 4}, floor_decode<false>},
    {"decode_stream", kDecodeBuffers, 2, {1, 4}, floor_decode<true>},
    {"encode", kEncodeBuffers, 3, {4, 4, 1}, floor_encode<false>},
    {"encode_stream", kEncodeBuffers, 3, {4, 4, 1}, floor_encode<true>},
    {"outer_step", kStepBuffers, 4, {4, 4, 4, 1}, floor_step<0>},
    {"outer_step_stream", kStepBuffers, 4, {4, 4, 4, 1}, floor_step<1>},
    {"outer_step_stream_all", kStepBuffers, 4, {4, 4, 4, 1}, floor_step<2>},
    {"outer_step_burst", kStepBuffers, 4, {4, 4, 4, 1}, floor_step_burst},
    {"arrival", kArrivalBuffers, 3, {4, 4, 1}, floor_arrival},
    {"feedback", kFeedbackBuffers, 5, {4, 4, 4, 4, 1}, floor_feedback<false>},
    {"feedback_stream", kFeedbackBuffers, 5, {4, 4, 4, 4, 1}, floor_feedback<true>},
    {},
};

}  // namespace
}  // namespace diloco::codec
