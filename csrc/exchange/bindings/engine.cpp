#include "exchange/engine/engine.h"

#include <ATen/ops/zeros.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "exchange/bindings/shared.h"

namespace py = pybind11;

namespace diloco {
namespace {

// A tensor with the same storage and without a Python object, so that its last reference can be
// dropped without the GIL; undefined for None.
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

void set_reduce_residuals(Job& job, const std::optional<at::Tensor>& residual,
                          const std::optional<at::Tensor>& new_residual) {
    job.reduce_residual = alias(residual);
    job.new_reduce_residual = alias(new_residual);
}

// The arguments for Staging (see job.h): the queue; on the device the payload, the result and the
// count of bad elements; the loader or None.
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
    const WithoutGil no_gil;
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
    const WithoutGil no_gil;
    engine.submit(job);
    return job;
}

void attach(Engine& engine, int64_t epoch, int rank, std::vector<int64_t> replicas,
            std::vector<BackendPtr> groups) {
    const WithoutGil no_gil;
    engine.attach({epoch, rank, std::move(replicas)}, std::move(groups));
}

std::string dead_reason(const Engine& engine) {
    const std::optional<Failure> failure = engine.dead_failure();
    return failure ? failure->message : "";
}

void inject_fault(Engine& engine, const std::string& action, const std::string& stage,
                  int64_t chunk, int64_t num_peers, double max_delay_us, uint64_t seed) {
    engine.inject_fault({action, stage, chunk, num_peers, max_delay_us, seed});
}

}  // namespace

void register_engine(py::module_& m) {
    py::class_<DeviceQueue, std::shared_ptr<DeviceQueue>>(m, "DeviceQueue")
        .def(py::init<c10::Device>(), py::arg("device"));
    py::class_<OwnStream>(m, "OwnStream")
        .def(py::init<c10::Device>(), py::arg("device"))
        .def_property_readonly("stream", &OwnStream::get,
                               "This object alone uses the stream; when the object is gone, "
                               "another one gets the stream.");
    using release = py::call_guard<WithoutGil>;
    py::class_<ChunkLoader, std::shared_ptr<ChunkLoader>>(m, "ChunkLoader")
        .def(py::init<c10::Device>(), py::arg("device"))
        .def("load", &ChunkLoader::load, py::arg("hosts"), py::arg("begin"), py::arg("end"))
        .def("release", &ChunkLoader::release, py::arg("hosts"), py::arg("begin"), py::arg("end"),
             py::arg("is_written"))
        .def("finish", &ChunkLoader::finish, release());
    py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
        .def(py::init([](double timeout_s) {
                 return std::shared_ptr<Engine>(
                     new Engine({from_seconds(timeout_s), check_signals}), [](Engine* engine) {
                         if (!engine->is_own_process()) return;
                         const WithoutGil no_gil;
                         delete engine;
                     });
             }),
             py::arg("timeout_s"))
        .def("attach", &attach, py::arg("epoch"), py::arg("rank"), py::arg("replicas"),
             py::arg("groups"))
        .def("start", &start, py::arg("plan"), py::arg("header"), py::arg("payload"),
             py::arg("result"), py::arg("outer"), py::arg("params"), py::arg("encode_key"),
             py::arg("reduce_key"), py::arg("residual"), py::arg("new_residual"),
             py::arg("reduce_residual"), py::arg("new_reduce_residual"), py::arg("bad"),
             py::arg("staging"), py::arg("is_overlapped"), py::arg("is_held") = false)
        .def("ship", &Engine::ship, py::arg("job"), py::arg("is_reset"), release())
        .def("submit", &submit, py::arg("header"), py::arg("blob") = py::none(),
             py::arg("sends") = std::vector<std::pair<int, at::Tensor>>(),
             py::arg("recvs") = std::vector<std::pair<int, at::Tensor>>())
        .def("seal", &Engine::seal, release())
        .def("reserve_staging", &Engine::reserve_staging, py::arg("num_bytes"), release())
        .def("emulate_link", &Engine::emulate_link, py::arg("gbps"), py::arg("rtt_ms"), release())
        .def("inject_fault", &inject_fault, py::arg("action") = "", py::arg("stage") = "",
             py::arg("chunk") = -1, py::arg("num_peers") = 0, py::arg("max_delay_us") = 0.0,
             py::arg("seed") = 0)
        .def(
            "close",
            [](Engine& engine, double patience_s) {
                const WithoutGil no_gil;
                engine.close(from_seconds(patience_s));
            },
            py::arg("patience_s"))
        .def("check_process", &Engine::check_process)
        .def_property_readonly("dead_reason", &dead_reason, "Empty while the epoch lives.")
        .def_property_readonly("dead_failure", &Engine::dead_failure,
                               "Why the current epoch is dead; None while it lives.");
}

}  // namespace diloco
