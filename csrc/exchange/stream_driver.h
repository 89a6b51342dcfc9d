// The stream driver: walks a schedule and enqueues it, without ever waiting on the host.
//
// Everything is enqueued from the calling thread, on one side stream and on the groups' own
// streams, in an order that is the same on all ranks. Waits are waits of the side stream. What a
// stream, an event or a collective is, the queue knows: a device's, or a recorder in tests.
#pragma once

#include <cstdint>

#include "exchange/schedule.h"

namespace diloco {

class StreamQueue {
  public:
    virtual ~StreamQueue() = default;

    // The side stream waits for what the caller has enqueued so far (the inner step).
    virtual void wait_for_caller() = 0;
    virtual void encode(int32_t chunk) = 0;
    // Collectives start when the side stream gets here, and run on their group's stream.
    virtual void all_to_all(int32_t chunk, int32_t lane) = 0;
    virtual void all_gather(int32_t chunk, int32_t lane) = 0;
    // The side stream waits for them.
    virtual void wait_all_to_all(int32_t chunk) = 0;
    virtual void wait_all_gather(int32_t chunk) = 0;
    virtual void reduce(int32_t chunk) = 0;
    // Sums the counts of bad elements over the ranks: the verdict that outer_step reads.
    virtual void sum_verdict() = 0;
    // The event that the caller's stream waits for, and the host may query.
    virtual void record_done() = 0;
};

// `schedule` comes after a header exchange that has completed.
void enqueue(const Schedule& schedule, StreamQueue& queue);

}  // namespace diloco
