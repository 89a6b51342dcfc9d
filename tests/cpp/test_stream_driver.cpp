// What the stream driver enqueues, and in which order, seen by a recorder in place of a device.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "check.h"
#include "exchange/stream_driver.h"

namespace {

using Calls = std::vector<std::string>;

class Recorder : public diloco::StreamQueue {
  public:
    void wait_for_caller() override { calls.push_back("wait_for_caller"); }
    void encode(int32_t chunk) override { add("encode", chunk); }
    void all_to_all(int32_t chunk, int32_t lane) override { add("all_to_all", chunk, lane); }
    void all_gather(int32_t chunk, int32_t lane) override { add("all_gather", chunk, lane); }
    void wait_all_to_all(int32_t chunk) override { add("wait_all_to_all", chunk); }
    void wait_all_gather(int32_t chunk) override { add("wait_all_gather", chunk); }
    void reduce(int32_t chunk) override { add("reduce", chunk); }
    void sum_verdict() override { calls.push_back("sum_verdict"); }
    void record_done() override { calls.push_back("record_done"); }

    Calls calls;

  private:
    void add(const char* what, int32_t chunk, int32_t lane = -1) {
        std::string call = std::string(what) + " " + std::to_string(chunk);
        if (lane >= 0) call += " on " + std::to_string(lane);
        calls.push_back(call);
    }
};

Calls record(int num_chunks, int num_phases, int num_lanes, int window) {
    Recorder recorder;
    diloco::enqueue(diloco::make_schedule(num_chunks, num_phases, num_lanes, window), recorder);
    return recorder.calls;
}

size_t position(const Calls& calls, const std::string& call) {
    const auto found = std::find(calls.begin(), calls.end(), call);
    EXPECT(found != calls.end());
    return static_cast<size_t>(found - calls.begin());
}

// Chunk 1 travels while chunk 0 is reduced; the second phase of 0 runs with the first one of 2.
void test_two_phases() {
    const Calls expected = {
        "wait_for_caller",   "encode 0",          "all_to_all 0 on 0", "encode 1",
        "all_to_all 1 on 1", "wait_all_to_all 0", "reduce 0",          "all_gather 0 on 0",
        "encode 2",          "all_to_all 2 on 0", "wait_all_to_all 1", "reduce 1",
        "all_gather 1 on 1", "wait_all_gather 0", "wait_all_to_all 2", "reduce 2",
        "all_gather 2 on 0", "wait_all_gather 1", "wait_all_gather 2", "sum_verdict",
        "record_done",
    };
    EXPECT(record(3, 2, 2, 2) == expected);
}

void test_one_phase() {
    const Calls expected = {
        "wait_for_caller",   "encode 0",    "all_to_all 0 on 0",
        "wait_all_to_all 0", "encode 1",    "all_to_all 1 on 0",
        "wait_all_to_all 1", "sum_verdict", "record_done",
    };
    EXPECT(record(2, 1, 1, 1) == expected);
}

void test_dependencies() {
    for (int window : {1, 2, 5}) {
        const Calls calls = record(9, 2, 3, window);
        for (int chunk = 0; chunk < 9; ++chunk) {
            const std::string k = std::to_string(chunk);
            const std::string lane = " on " + std::to_string(chunk % 3);
            const size_t sent = position(calls, "all_to_all " + k + lane);
            const size_t reduced = position(calls, "reduce " + k);
            const size_t published = position(calls, "all_gather " + k + lane);
            EXPECT(position(calls, "encode " + k) < sent);
            EXPECT(sent < position(calls, "wait_all_to_all " + k));
            EXPECT(position(calls, "wait_all_to_all " + k) < reduced);
            EXPECT(reduced < published);
            EXPECT(published < position(calls, "wait_all_gather " + k));
        }
        EXPECT(calls.front() == "wait_for_caller" && calls.back() == "record_done");
        EXPECT(position(calls, "sum_verdict") == calls.size() - 2);
    }
}

}  // namespace

int main() {
    test_two_phases();
    test_one_phase();
    test_dependencies();
    std::puts("stream driver: ok");
}
