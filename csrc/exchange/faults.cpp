#include "exchange/faults.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

namespace diloco {

void FaultInjector::set(Fault fault) {
    fault_ = std::move(fault);
    random_.seed(fault_.seed);
}

void FaultInjector::before(const char* stage, int64_t chunk, int64_t num_told) {
    if (fault_.max_delay_us > 0) {
        std::uniform_real_distribution<double> delay(0.0, fault_.max_delay_us);
        std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(delay(random_)));
    }
    if (fault_.action.empty() || fault_.stage != stage) return;
    if (fault_.chunk >= 0 && fault_.chunk != chunk) return;
    if (fault_.num_peers != num_told) return;
    const std::string action = std::exchange(fault_.action, "");
    if (action == "kill") kill(getpid(), SIGKILL);
    if (action == "sleep")
        std::this_thread::sleep_for(std::chrono::duration<double>(fault_.seconds));
    if (action == "fail") throw std::runtime_error("a failure made on purpose");
}

}  // namespace diloco
