#include "exchange/stream_driver.h"

namespace diloco {

void enqueue(const Schedule& schedule, StreamQueue& queue) {
    queue.wait_for_caller();
    for (const Step& step : schedule) {
        switch (step.action) {
            case Action::kPostExchange:
                // A chunk is encoded just before it goes, so that it travels while the next is.
                queue.encode(step.chunk);
                queue.all_to_all(step.chunk, step.lane);
                break;
            case Action::kWaitExchange:
                queue.wait_all_to_all(step.chunk);
                break;
            case Action::kReduce:
                queue.reduce(step.chunk);
                break;
            case Action::kPostPublish:
                queue.all_gather(step.chunk, step.lane);
                break;
            case Action::kWaitPublish:
                queue.wait_all_gather(step.chunk);
                break;
            case Action::kVote:
                queue.sum_verdict();
                break;
        }
    }
    queue.record_done();
}

}  // namespace diloco
