#include "exchange/engine/faults.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

namespace diloco {

void FaultInjector::add(Fault fault) {
    if (fault.action.empty()) {
        max_delay_us_ = fault.max_delay_us;
        random_.seed(fault.seed);
    } else {
        faults_.push_back(std::move(fault));
    }
}

void FaultInjector::before(const char* stage, int64_t chunk, int64_t num_told) {
    if (max_delay_us_ > 0) {
        std::uniform_real_distribution<double> delay(0.0, max_delay_us_);
        std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(delay(random_)));
    }
    const auto due = std::find_if(faults_.begin(), faults_.end(), [&](const Fault& fault) {
        return fault.stage == stage && (fault.chunk < 0 || fault.chunk == chunk) &&
               fault.num_peers == num_told;
    });
    if (due == faults_.end()) return;
    const Fault fault = *due;
    faults_.erase(due);
    if (fault.action == "kill") kill(getpid(), SIGKILL);
    // raise() signals this thread. A signal to the process may stop another thread first, and this
    // thread later.
    if (fault.action == "stop") raise(SIGSTOP);
    if (fault.action == "fail") throw std::runtime_error("a failure made on purpose");
}

}  // namespace diloco
