// The messages of fixed size that ranks send around a payload: a header before, a vote after.
//
// All headers are compared before any message is posted whose size depends on the model: if two
// ranks posted different sizes, gloo would abort the process, and NCCL would hang. Little endian.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace diloco {

constexpr uint32_t kMagic = 0x434c4944;  // "DILC"
constexpr uint16_t kProtocolVersion = 4;

enum class Kind : uint32_t {
    kSync = 1,
    kFlush,
    kAllReduce,
    kObjects,    // every rank sends a small blob to every rank
    kBroadcast,  // one rank sends bytes, which are not encoded, to all
};

const char* kind_name(Kind kind);
Kind kind_from_name(const std::string& name);

// Bit 1 of Header::flags: this rank's values are not finite or out of the wire's range, so that its
// payload counts with weight 0. Ranks may differ in this bit.
constexpr uint8_t kReset = 2;
// Bit 2 of Header::flags: this rank knows that the group is to change after this round. Ranks may
// differ in this bit; each receives the flags of all, so all stop after the same round.
constexpr uint8_t kChange = 4;

// Fields are as narrow as possible: with eight ranks, headers are a measurable share of a round.
struct Header {
    uint32_t magic = kMagic;
    uint16_t protocol = kProtocolVersion;
    uint8_t kind = 0;
    uint8_t flags = 0;  // bit 0: stochastic rounding; kReset; kChange
    uint64_t sequence = 0;
    uint64_t layout_hash = 0;
    uint64_t history = 0;      // digest of the outer state and of all rounds applied to it
    int64_t num_elements = 0;  // kBroadcast: bytes in all
    int64_t inner_step = 0;
    double weight = 1.0;
    double outer_lr = 0.0;
    double gap = 1.0;
    int32_t epoch = 0;
    int32_t replica = 0;
    char wire[8] = {};  // without a terminator when the name fills the field
    int32_t block_size = 0;
    int32_t num_chunks = 0;
    int32_t fragment = 0;
    int32_t num_fragments = 0;
    int32_t round = 0;
    int32_t sync_every = 0;
    int32_t source_rank = 0;  // kBroadcast
    uint32_t blob_bytes = 0;  // kObjects: length of this rank's blob; else a digest, or 0
};
// If you change the size, avoid padding and change HANDSHAKE in diloco_comm/base/extension.py.
static_assert(sizeof(Header) == 120, "the header is a wire format");

// Call visit(name, member, label) for each number that Python may write. Numbers with a label must
// be equal on all replicas, and the label names the number in an error. An error shows the first
// number that differs, so causes come before effects: the configuration before the sizes.
template <typename Visit>
void visit_numbers(Visit&& visit) {
    visit("block_size", &Header::block_size, "block_size");
    visit("num_fragments", &Header::num_fragments, "number of fragments");
    visit("sync_every", &Header::sync_every, "sync_every");
    visit("fragment", &Header::fragment, "fragment");
    visit("round", &Header::round, "round");
    visit("num_elements", &Header::num_elements, "num_elements");
    visit("layout_hash", &Header::layout_hash, "layout_hash");
    visit("outer_lr", &Header::outer_lr, "outer_lr");
    visit("history", &Header::history, "outer state");
    visit("num_chunks", &Header::num_chunks, "number of chunks (chunk_bytes)");
    visit("source_rank", &Header::source_rank, "source_rank");
    visit("weight", &Header::weight, nullptr);
    visit("inner_step", &Header::inner_step, nullptr);
    visit("gap", &Header::gap, nullptr);
    visit("blob_bytes", &Header::blob_bytes, nullptr);
}

struct Vote {
    uint64_t sequence = 0;
    int64_t num_bad = 0;       // elements of this rank's payload that were NaN, Inf or out of range
    int64_t num_bad_mean = 0;  // elements out of range in the mean's runs that this rank computed
};
static_assert(sizeof(Vote) == 24, "the vote is a wire format");

// The bad elements (NaN, Inf or out of the wire's range) of a round, from the votes.
struct BadElements {
    std::string text;  // one sentence that names replicas and numbers; empty when there are none
    std::vector<int64_t> replicas;  // that have bad elements; all replicas, if the mean has some
};

// Finds the bad elements that the votes report. `votes` and `replicas` are in rank order.
BadElements find_bad_elements(const std::vector<Vote>& votes, const std::vector<int64_t>& replicas);

// The sentence for a round in which all weights are 0, because each reset replica has weight 0.
std::string nothing_to_average(const std::vector<int64_t>& reset_replicas);

// The first difference that forbids this exchange, as one sentence that names replicas and values;
// empty when the headers agree. `headers` in rank order.
std::string find_mismatch(const std::vector<Header>& headers);

}  // namespace diloco
