#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "codec/codec.h"
#include "exchange/bindings/shared.h"
#include "exchange/engine/engine.h"
#include "exchange/engine/words.h"

namespace py = pybind11;

namespace diloco {
namespace {

using std::chrono::milliseconds;

Layout make_layout(int64_t num_elements, int64_t num_runs, int64_t run_elements, int64_t run_bytes,
                   const std::string& wire, int64_t block_size, int64_t code_offset,
                   std::pair<int64_t, int64_t> code_unit) {
    return {num_elements, num_runs,    run_elements,    run_bytes,       wire,
            block_size,   code_offset, code_unit.first, code_unit.second};
}

std::shared_ptr<Plan> make_plan(const Layout& layout, const Layout& mean_layout, int64_t world_size,
                                int num_phases, int num_lanes, int window,
                                const std::string& impl) {
    auto plan = std::make_shared<Plan>();
    plan->layout = layout;
    plan->mean_layout = mean_layout;
    plan->num_chunks = layout.num_runs / world_size;
    TORCH_CHECK_VALUE(plan->num_chunks <= kMaxChunks, "an exchange has at most ", kMaxChunks,
                      " chunks, got ", plan->num_chunks, ": chunk_bytes is too small for ",
                      layout.num_elements, " elements");
    plan->num_phases = num_phases;
    plan->window = window;
    plan->schedule =
        make_schedule(static_cast<int>(plan->num_chunks), num_phases, num_lanes, window);
    plan->impl = impl;
    return plan;
}

// Waits at most `seconds` until `is_there` is true, which is called under the job's mutex whenever
// `changed` is notified. Returns whether it was true. Takes the GIL ten times a second, so that
// Ctrl-C ends the wait.
template <class Condition>
bool wait_for(Job& job, std::condition_variable& changed, double seconds, Condition is_there) {
    check_process(job.pid);
    const auto deadline = Clock::now() + from_seconds(seconds);
    while (true) {
        {
            const WithoutGil no_gil;
            std::unique_lock<std::mutex> lock(job.mutex);
            const auto slice = std::min(deadline, Clock::now() + milliseconds(100));
            if (changed.wait_until(lock, slice, is_there)) return true;
        }
        check_signals();
        if (Clock::now() >= deadline) return false;
    }
}

bool wait_job(Job& job, double seconds) {
    return wait_for(job, job.changed, seconds, [&] { return job.is_done; });
}

// Waits at most `seconds` until more than `runs` runs of the result are complete, or the job is
// done. Returns the number of complete runs.
int64_t wait_landed(Job& job, int64_t runs, double seconds) {
    int64_t num_landed = runs;
    wait_for(job, job.landed, seconds, [&] {
        num_landed = job.num_landed;
        return job.is_done || num_landed > runs;
    });
    return num_landed;
}

// Makes the caller's stream wait for the copies of a job to the device. The job must be done, so
// that all its copies are enqueued.
void block_caller(Job& job) {
    if (!job.staging.has_value() || !job.staging->stored) return;
    job.staging->queue->block_caller(job.staging->stored);
}

std::map<std::string, int64_t> counters(Job& job) {
    check_process(job.pid);
    std::lock_guard<std::mutex> lock(job.mutex);
    if (!job.is_done) return {};
    return {{"caller_minor_faults", job.caller_faults},
            {"engine_minor_faults", job.engine_faults},
            {"sent_bytes", job.sent_bytes},
            {"received_bytes", job.received_bytes}};
}

uint64_t digest_of(Job& job) {
    check_process(job.pid);
    std::lock_guard<std::mutex> lock(job.mutex);
    if (!job.is_done || !job.has_payload()) return 0;
    const Plan& plan = *job.plan;
    const int64_t num_payloads = plan.num_phases == 1 ? plan.world_size() : 1;
    const int64_t num_bytes = num_payloads * plan.mean_bytes();
    return codec::finish_digest(job.digest.product, job.digest.sum,
                                static_cast<uint64_t>(num_bytes));
}

std::optional<int64_t> num_bad_encoded(Job& job) {
    check_process(job.pid);
    std::unique_lock<std::mutex> lock(job.mutex);
    const Mark mark = job.fetched_mark(job.plan->layout.num_runs - 1);
    lock.unlock();
    if (mark && !mark->query()) return std::nullopt;
    return job.encode_bad.item<int64_t>();
}

// A getter for Python: copies a member of a job under the job's mutex.
template <class T>
auto guarded(T Job::* member) {
    return [member](Job& job) {
        check_process(job.pid);
        std::lock_guard<std::mutex> lock(job.mutex);
        return job.*member;
    };
}

// A getter for Python of a member that the engine thread writes without the mutex. It returns an
// empty value until the job is done.
template <class T>
auto outcome(T Job::* member) {
    return [member](Job& job) {
        check_process(job.pid);
        std::lock_guard<std::mutex> lock(job.mutex);
        return job.is_done ? job.*member : T();
    };
}

std::string waiting_words(Job& job) {
    const std::optional<int64_t> awaited = guarded(&Job::awaited)(job);
    if (!awaited) return "";
    const std::string subject = subject_of(job.header);
    if (*awaited < 0) return "the payloads and votes of " + subject;
    return "replica " + std::to_string(*awaited) + " to begin " + subject;
}

// The name of job.standing: how far the vote was when the job ended.
std::string standing_name(Job& job) {
    switch (outcome(&Job::standing)(job)) {
        case Standing::kNone:
            return "none";
        case Standing::kVoted:
            return "voted";
        case Standing::kRejected:
            return "rejected";
        case Standing::kAgreed:
            return "agreed";
    }
    return "unknown";
}

}  // namespace

void register_jobs(py::module_& m) {
    py::class_<Layout>(m, "Layout")
        .def(py::init(&make_layout), py::arg("num_elements"), py::arg("num_runs"),
             py::arg("run_elements"), py::arg("run_bytes"), py::arg("wire"), py::arg("block_size"),
             py::arg("code_offset"), py::arg("code_unit"));
    py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan").def(
        py::init(&make_plan), py::arg("layout"), py::arg("mean_layout"), py::arg("world_size"),
        py::arg("num_phases"), py::arg("num_lanes"), py::arg("window"), py::arg("impl"));
    py::class_<Failure>(m, "Failure")
        .def_readonly("kind", &Failure::kind)
        .def_readonly("message", &Failure::message)
        .def_readonly("stage", &Failure::stage)
        .def_readonly("cause", &Failure::cause)
        .def_readonly("seconds", &Failure::seconds)
        .def_readonly("missing", &Failure::missing)
        .def_readonly("replicas", &Failure::replicas);
    py::class_<Job, std::shared_ptr<Job>>(m, "Job")
        .def("wait", &wait_job, py::arg("seconds"), "Whether it is done by then.")
        .def("wait_landed", &wait_landed, py::arg("runs"), py::arg("seconds"),
             "Wait until more than so many runs of the result are complete; how many are.")
        .def("block_caller", &block_caller,
             "Make the caller's stream wait until the result is on the device.")
        .def_property_readonly("is_done", guarded(&Job::is_done))
        .def_property_readonly("failure", guarded(&Job::failure))
        .def_property_readonly("standing", &standing_name,
                               "How far the vote was in the end: see Standing in job.h.")
        .def_property_readonly("waiting", &waiting_words,
                               "What the job waits for; empty while it does not run.")
        .def_property_readonly("headers", guarded(&Job::headers))
        .def_property_readonly("weights", guarded(&Job::weights))
        .def_property_readonly("blobs", outcome(&Job::blobs))
        .def_property_readonly("seconds", outcome(&Job::seconds))
        .def_property_readonly("encode_seconds", guarded(&Job::encode_seconds))
        .def_property_readonly(
            "num_bad_encoded", &num_bad_encoded,
            "Own elements that this wire cannot carry; None: not on the host yet.")
        .def_property_readonly("digest", &digest_of,
                               "Of the payloads, or of their encoded mean if that travels; 0 while "
                               "they are not all here.")
        .def_property_readonly("counters", &counters);
}

}  // namespace diloco
