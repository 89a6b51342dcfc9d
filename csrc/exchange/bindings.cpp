#include "exchange/bindings.h"

#include <pybind11/stl.h>
#include <torch/extension.h>

#include <algorithm>
#include <cmath>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "codec/codec.h"
#include "exchange/engine/engine.h"
#include "exchange/engine/words.h"
#include "exchange/failure/bounded_store.h"
#include "exchange/transport/pages.h"

namespace py = pybind11;

namespace diloco {
namespace {

using std::chrono::milliseconds;

// At most ten years: a clock that counts nanoseconds ends after three hundred. Never less than it
// says.
milliseconds from_seconds(double seconds) {
    constexpr double kMostSeconds = 10 * 365 * 86400.0;
    TORCH_CHECK_VALUE(!std::isnan(seconds), "a time must be a number of seconds, got nan");
    const std::chrono::duration<double> clamped(std::clamp(seconds, 0.0, kMostSeconds));
    return std::chrono::ceil<milliseconds>(clamped);
}

// A tensor of the same storage without a Python object; undefined for None.
at::Tensor alias(const std::optional<at::Tensor>& tensor) {
    return tensor.has_value() ? tensor->detach() : at::Tensor();
}

c10::IValue alias_value(const std::optional<at::Tensor>& tensor) {
    return tensor.has_value() ? c10::IValue(tensor->detach()) : c10::IValue();
}

c10::IValue alias_list(const std::vector<at::Tensor>& tensors) {
    c10::List<at::Tensor> list;
    list.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) list.push_back(tensor.detach());
    return list;
}

std::vector<Transfer> alias_transfers(const std::vector<std::pair<int, at::Tensor>>& items) {
    std::vector<Transfer> transfers;
    for (const auto& [peer, bytes] : items) transfers.push_back({peer, bytes.detach()});
    return transfers;
}

std::shared_ptr<Plan> make_plan(int64_t num_elements, int64_t num_runs, int64_t run_elements,
                                int64_t run_bytes, const std::string& wire, int64_t block_size,
                                int64_t code_offset, std::pair<int64_t, int64_t> code_unit,
                                int64_t world_size, bool is_gathered, int num_lanes, int window,
                                const std::string& impl) {
    auto plan = std::make_shared<Plan>();
    plan->layout = {num_elements, num_runs,    run_elements,    run_bytes,       wire,
                    block_size,   code_offset, code_unit.first, code_unit.second};
    plan->num_chunks = num_runs / world_size;
    TORCH_CHECK_VALUE(plan->num_chunks <= kMaxChunks, "an exchange has at most ", kMaxChunks,
                      " chunks, got ", plan->num_chunks, ": chunk_bytes is too small for ",
                      num_elements, " elements");
    plan->num_phases = world_size == 1 ? 0 : world_size == 2 || is_gathered ? 1 : 2;
    plan->window = window;
    plan->schedule = make_schedule(static_cast<int>(plan->num_chunks),
                                   static_cast<int>(plan->num_phases), num_lanes, window);
    plan->impl = impl;
    return plan;
}

void check_signals() {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// Waits at most `seconds` for `is_there`, which is asked under the job's mutex when `changed` is
// notified; whether it is. Holds the GIL between slices, so that Ctrl-C ends the wait.
template <class Condition>
bool wait_for(Job& job, std::condition_variable& changed, double seconds, Condition is_there) {
    check_process(job.pid);
    const auto deadline = Clock::now() + from_seconds(seconds);
    while (true) {
        {
            py::gil_scoped_release no_gil;
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
// done; how many are.
int64_t wait_landed(Job& job, int64_t runs, double seconds) {
    int64_t num_landed = runs;
    wait_for(job, job.landed, seconds, [&] {
        num_landed = job.num_landed;
        return job.is_done || num_landed > runs;
    });
    return num_landed;
}

// For a job that is done: its copies are enqueued.
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
    const int64_t num_bytes = num_payloads * plan.payload_bytes();
    return codec::finish_digest(job.digest.product, job.digest.sum,
                                static_cast<uint64_t>(num_bytes));
}

void register_messages(py::module_& m) {
    py::class_<Header>(m, "Header")
        .def(py::init([](const std::string& kind) {
                 Header header;
                 header.kind = static_cast<uint8_t>(kind_from_name(kind));
                 return header;
             }),
             py::arg("kind"))
        .def_property_readonly("kind", [](const Header& h) { return kind_name(Kind(h.kind)); })
        .def_property(
            "wire",
            [](const Header& h) { return std::string(h.wire, strnlen(h.wire, sizeof(h.wire))); },
            [](Header& h, const std::string& wire) {
                TORCH_CHECK_VALUE(wire.size() <= sizeof(h.wire), "wire name too long: ", wire);
                std::memset(h.wire, 0, sizeof(h.wire));
                std::memcpy(h.wire, wire.data(), wire.size());
            })
        .def_readwrite("flags", &Header::flags)
        .def_property_readonly("is_reset", [](const Header& h) { return (h.flags & kReset) != 0; })
        .def_readonly("replica", &Header::replica)
        .def_readonly("epoch", &Header::epoch)
        .def_readwrite("block_size", &Header::block_size)
        .def_readwrite("num_elements", &Header::num_elements)
        .def_readwrite("num_chunks", &Header::num_chunks)
        .def_readwrite("layout_hash", &Header::layout_hash)
        .def_readwrite("history", &Header::history)
        .def_readwrite("fragment", &Header::fragment)
        .def_readwrite("round", &Header::round)
        .def_readwrite("sync_every", &Header::sync_every)
        .def_readwrite("num_fragments", &Header::num_fragments)
        .def_readwrite("inner_step", &Header::inner_step)
        .def_readwrite("blob_bytes", &Header::blob_bytes)
        .def_readwrite("source_rank", &Header::source_rank)
        .def_readwrite("weight", &Header::weight)
        .def_readwrite("outer_lr", &Header::outer_lr)
        .def_readwrite("gap", &Header::gap);
    m.attr("RESET") = int{kReset};
    m.def("find_mismatch", &find_mismatch, py::arg("headers"));
    m.def("nothing_to_average", &nothing_to_average, py::arg("reset_replicas"));
    m.def(
        "find_bad_elements",
        [](const std::vector<std::pair<int64_t, int64_t>>& numbers,
           const std::vector<int64_t>& replicas) {
            std::vector<Vote> votes(numbers.size());
            for (size_t rank = 0; rank < numbers.size(); ++rank) {
                std::tie(votes[rank].num_bad, votes[rank].num_bad_mean) = numbers[rank];
            }
            const BadElements bad = find_bad_elements(votes, replicas);
            return std::make_pair(bad.text, bad.replicas);
        },
        py::arg("numbers"), py::arg("replicas"),
        "Say what votes (own, of the mean) in rank order tell: (sentence or \"\", whose).");
}

std::optional<int64_t> num_bad_encoded(Job& job) {
    check_process(job.pid);
    std::unique_lock<std::mutex> lock(job.mutex);
    const Mark mark = job.fetched_mark(job.plan->layout.num_runs - 1);
    lock.unlock();
    if (mark && !mark->query()) return std::nullopt;
    return job.encode_bad.item<int64_t>();
}

// A member of a job, copied under its mutex.
template <class T>
auto guarded(T Job::* member) {
    return [member](Job& job) {
        check_process(job.pid);
        std::lock_guard<std::mutex> lock(job.mutex);
        return job.*member;
    };
}

// One that the engine thread writes without the mutex: empty until the job is done.
template <class T>
auto outcome(T Job::* member) {
    return [member](Job& job) {
        check_process(job.pid);
        std::lock_guard<std::mutex> lock(job.mutex);
        return job.is_done ? job.*member : T();
    };
}

// How far the vote was when the job ended.
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

void register_jobs(py::module_& m) {
    py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan").def(
        py::init(&make_plan), py::arg("num_elements"), py::arg("num_runs"), py::arg("run_elements"),
        py::arg("run_bytes"), py::arg("wire"), py::arg("block_size"), py::arg("code_offset"),
        py::arg("code_unit"), py::arg("world_size"), py::arg("is_gathered"), py::arg("num_lanes"),
        py::arg("window"), py::arg("impl"));
    py::class_<Failure>(m, "Failure")
        .def_readonly("kind", &Failure::kind)
        .def_readonly("message", &Failure::message)
        .def_readonly("stage", &Failure::stage)
        .def_readonly("cause", &Failure::cause)
        .def_readonly("seconds", &Failure::seconds)
        .def_readonly("missing", &Failure::missing)
        .def_readonly("survivors", &Failure::survivors)
        .def_readonly("cuts", &Failure::cuts)
        .def_readonly("went_on_in", &Failure::went_on_in)
        .def_readonly("replicas", &Failure::replicas)
        .def_readonly("inner_steps", &Failure::inner_steps);
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
        .def_property_readonly("waiting", guarded(&Job::waiting),
                               "What it waits for; empty when nothing, or not for long.")
        .def_property_readonly("headers", guarded(&Job::headers))
        .def_property_readonly("weights", guarded(&Job::weights))
        .def_property_readonly("blobs", outcome(&Job::blobs))
        .def_property_readonly("seconds", outcome(&Job::seconds))
        .def_property_readonly("encode_seconds", guarded(&Job::encode_seconds))
        .def_property_readonly("num_bad_encoded", &num_bad_encoded,
                               "Own elements that no wire carries; None: not on the host yet.")
        .def_property_readonly("digest", &digest_of,
                               "Of the payloads that are added up; 0 while they are not all here.")
        .def_property_readonly("counters", &counters);
}

void set_reduce_residuals(Job& job, const std::optional<at::Tensor>& residual,
                          const std::optional<at::Tensor>& new_residual) {
    job.reduce_residual = alias(residual);
    job.new_reduce_residual = alias(new_residual);
}

// The device's twins of payload, result and count: (queue, payload, result, bad, loader or None).
using StagingArguments =
    std::tuple<std::shared_ptr<DeviceQueue>, at::Tensor, std::optional<at::Tensor>, at::Tensor,
               std::shared_ptr<ChunkLoader>>;

JobPtr start(Engine& engine, const std::shared_ptr<Plan>& plan, const Header& header,
             const at::Tensor& payload, const std::optional<at::Tensor>& result,
             const std::optional<at::Tensor>& outer, const std::vector<at::Tensor>& params,
             int64_t encode_key, int64_t reduce_key, const std::optional<at::Tensor>& residual,
             const std::optional<at::Tensor>& new_residual,
             const std::optional<at::Tensor>& reduce_residual,
             const std::optional<at::Tensor>& new_reduce_residual,
             const std::optional<at::Tensor>& bad, const std::optional<StagingArguments>& staging,
             bool is_overlapped, bool is_held) {
    auto job = std::make_shared<Job>();
    job->plan = plan;
    job->header = header;
    job->payload = payload.detach();
    job->result = alias(result);
    job->encode = {alias_value(outer), alias_list(params), encode_key, alias_value(residual),
                   alias_value(new_residual)};
    job->is_overlapped = is_overlapped;
    job->is_held = is_held;
    job->reduce_key = reduce_key;
    set_reduce_residuals(*job, reduce_residual, new_reduce_residual);
    job->encode_bad = bad.has_value() ? bad->detach() : at::zeros({1}, at::kLong);
    job->reduce_bad = at::zeros({1}, at::kLong);
    if (staging.has_value()) {
        const auto& [queue, device_payload, device_result, device_bad, loader] = *staging;
        Staging& own = job->staging.emplace();
        own.queue = queue;
        own.payload = device_payload.detach();
        own.result = alias(device_result);
        own.bad = device_bad.detach();
        own.loader = loader;
        if (loader) own.outer = alias(outer);
    }
    py::gil_scoped_release no_gil;
    engine.start(job);
    return job;
}

JobPtr submit(Engine& engine, const Header& header, const std::optional<at::Tensor>& blob,
              const std::vector<std::pair<int, at::Tensor>>& sends,
              const std::vector<std::pair<int, at::Tensor>>& recvs) {
    auto job = std::make_shared<Job>();
    job->header = header;
    job->blob = alias(blob);
    job->sends = alias_transfers(sends);
    job->recvs = alias_transfers(recvs);
    py::gil_scoped_release no_gil;
    engine.submit(job);
    return job;
}

JobPtr give_up(Engine& engine, const Header& header, const std::string& reason, double seconds) {
    auto job = std::make_shared<Job>();
    job->header = header;
    job->lost = {reason, seconds};
    py::gil_scoped_release no_gil;
    engine.give_up(job);
    return job;
}

void attach(Engine& engine, int64_t epoch, int rank, std::vector<int64_t> replicas,
            std::vector<BackendPtr> groups, c10::intrusive_ptr<c10d::Store> store,
            const std::string& prefix, std::vector<std::string> addresses) {
    py::gil_scoped_release no_gil;
    engine.attach({epoch, rank, std::move(replicas), std::move(addresses)}, std::move(groups),
                  std::move(store), prefix);
}

void inject_fault(Engine& engine, const std::string& action, const std::string& stage,
                  int64_t chunk, int64_t num_peers, double max_delay_us, uint64_t seed) {
    engine.inject_fault({action, stage, chunk, num_peers, max_delay_us, seed});
}

void register_engine(py::module_& m) {
    py::class_<DeviceQueue, std::shared_ptr<DeviceQueue>>(m, "DeviceQueue")
        .def(py::init<c10::Device>(), py::arg("device"));
    py::class_<OwnStream>(m, "OwnStream")
        .def(py::init<c10::Device>(), py::arg("device"))
        .def_property_readonly("stream", &OwnStream::get,
                               "Given to somebody else when this object is gone.");
    using release = py::call_guard<py::gil_scoped_release>;
    py::class_<ChunkLoader, std::shared_ptr<ChunkLoader>>(m, "ChunkLoader")
        .def(py::init<c10::Device>(), py::arg("device"))
        .def("load", &ChunkLoader::load, py::arg("hosts"), py::arg("begin"), py::arg("end"))
        .def("release", &ChunkLoader::release, py::arg("hosts"), py::arg("begin"), py::arg("end"),
             py::arg("is_written"))
        .def("finish", &ChunkLoader::finish, release());
    py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
        .def(py::init([](int64_t replica, double timeout_s, double report_patience_s,
                         double suspect_after_s, const std::string& interface) {
                 // The name of this host may be looked up.
                 py::gil_scoped_release no_gil;
                 return std::shared_ptr<Engine>(
                     new Engine({replica, from_seconds(timeout_s), from_seconds(report_patience_s),
                                 check_signals, from_seconds(suspect_after_s), interface}),
                     [](Engine* engine) {
                         if (!engine->is_own_process()) return;
                         py::gil_scoped_release no_gil;
                         delete engine;
                     });
             }),
             py::arg("replica"), py::arg("timeout_s"), py::arg("report_patience_s"),
             py::arg("suspect_after_s") = 30.0, py::arg("interface") = "")
        .def("attach", &attach, py::arg("epoch"), py::arg("rank"), py::arg("replicas"),
             py::arg("groups"), py::arg("store"), py::arg("prefix"),
             py::arg("addresses") = std::vector<std::string>())
        .def("start", &start, py::arg("plan"), py::arg("header"), py::arg("payload"),
             py::arg("result"), py::arg("outer"), py::arg("params"), py::arg("encode_key"),
             py::arg("reduce_key"), py::arg("residual"), py::arg("new_residual"),
             py::arg("reduce_residual"), py::arg("new_reduce_residual"), py::arg("bad"),
             py::arg("staging"), py::arg("is_overlapped"), py::arg("is_held") = false)
        .def("ship", &Engine::ship, py::arg("job"), py::arg("is_reset"), release())
        .def("submit", &submit, py::arg("header"), py::arg("blob") = py::none(),
             py::arg("sends") = std::vector<std::pair<int, at::Tensor>>(),
             py::arg("recvs") = std::vector<std::pair<int, at::Tensor>>())
        .def("give_up", &give_up, py::arg("header"), py::arg("reason"), py::arg("seconds"),
             "End the epoch because of an exchange on streams; the job tells who goes on.")
        .def("watch_streams", &Engine::watch_streams, py::arg("are_under_way"),
             "Say that an exchange on streams began or ended, and whether any is under way.")
        .def_property_readonly("streams_trouble", &Engine::streams_trouble,
                               "Why exchanges on streams cannot end; empty while they may.")
        .def("seal", &Engine::seal, release())
        .def("reserve_staging", &Engine::reserve_staging, py::arg("num_bytes"), release())
        .def("emulate_link", &Engine::emulate_link, py::arg("gbps"), py::arg("rtt_ms"), release())
        .def("inject_fault", &inject_fault, py::arg("action") = "", py::arg("stage") = "",
             py::arg("chunk") = -1, py::arg("num_peers") = 0, py::arg("max_delay_us") = 0.0,
             py::arg("seed") = 0)
        .def(
            "close",
            [](Engine& engine, double patience_s, int64_t inner_step) {
                py::gil_scoped_release no_gil;
                engine.close(from_seconds(patience_s), inner_step);
            },
            py::arg("patience_s"), py::arg("inner_step"))
        .def("check_process", &Engine::check_process)
        .def_property_readonly("address", &Engine::address,
                               "Where peers may try to reach us, host:port; empty: not known.")
        .def_property_readonly("is_store_lost", &Engine::is_store_lost,
                               "Whether the connection to the store has broken for good.")
        .def_property_readonly("dead_reason", &Engine::dead_reason)
        .def_property_readonly("dead_failure", &Engine::dead_failure,
                               "Why the current epoch is dead; of the last one while it lives.");
}

}  // namespace

void register_exchange(py::module_& m) {
    m.attr("MAX_REPLICAS") = codec::kMaxTerms;
    m.def("empty_pages", &empty_pages, py::arg("num_bytes"),
          "A zeroed uint8 tensor, 64-byte aligned, huge pages advised, every page touched.");
    m.def(
        "connect_store",
        [](const std::string& host, int port, double timeout_s) {
            py::gil_scoped_release no_gil;
            return connect_store(host, static_cast<uint16_t>(port), from_seconds(timeout_s));
        },
        py::arg("host"), py::arg("port"), py::arg("timeout_s"),
        "A client of the TCPStore at an address; also a host that hangs is given up in time.");
    m.def(
        "bounded_store",
        [](c10::intrusive_ptr<c10d::Store> store, double limit_s) {
            return c10::intrusive_ptr<c10d::Store>(
                c10::make_intrusive<BoundedStore>(std::move(store), from_seconds(limit_s)));
        },
        py::arg("store"), py::arg("limit_s"), py::keep_alive<0, 1>(),
        "The store with calls that fail when its host does not answer in time.");
    m.def(
        "are_reached",
        [](const std::vector<std::string>& addresses, double limit_s) {
            py::gil_scoped_release no_gil;
            std::vector<std::optional<bool>> are_reached;
            for (const Answer answer : try_to_reach(addresses, from_seconds(limit_s))) {
                are_reached.emplace_back(answer == Answer::kReached);
                if (answer == Answer::kUnknown) are_reached.back().reset();
            }
            return are_reached;
        },
        py::arg("addresses"), py::arg("limit_s"),
        "Whether a connection can be made to each host:port in time; None: it could not be tried.");
    m.def("largest_reaching", &largest_reaching, py::arg("members"), py::arg("cuts"),
          "The largest subset without a pair in `cuts`; of several, that with the lowest ids.");
    m.def("describe_cuts", &cuts_of, py::arg("cuts"),
          "Say in words which pairs of replicas cannot reach each other.");
    m.def("minor_faults", &minor_faults, "Minor page faults of the calling thread so far.");
    m.def(
        "make_schedule",
        [](int num_chunks, int num_phases, int num_lanes, int window) {
            std::vector<std::tuple<std::string, int, int>> steps;
            for (const Step& step : make_schedule(num_chunks, num_phases, num_lanes, window)) {
                steps.emplace_back(action_name(step.action), step.chunk, step.lane);
            }
            return steps;
        },
        py::arg("num_chunks"), py::arg("num_phases"), py::arg("num_lanes"), py::arg("window"),
        "The steps of an exchange in their order: (action, chunk, lane).");
    register_messages(m);
    register_jobs(m);
    register_engine(m);
}

}  // namespace diloco
