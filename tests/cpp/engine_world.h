// What the tests of the engine share: jobs, and ranks that are threads of one process.
#pragma once

#include <ATen/Functions.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "exchange/engine/engine.h"
#include "exchange/transport/pages.h"
#include "loopback_backend.h"

namespace diloco_test {

using diloco::BackendPtr;
using diloco::Engine;
using diloco::Job;
using diloco::JobPtr;
using diloco::Kind;
using diloco::Plan;

constexpr int64_t kBlock = 64;
constexpr int kWindow = 3;

inline std::shared_ptr<Plan> make_plan(int64_t num_elements, int size, int64_t num_chunks,
                                       int lanes) {
    auto plan = std::make_shared<Plan>();
    const int64_t runs = size * num_chunks;
    const int64_t per_run = (num_elements + runs - 1) / runs;
    const int64_t run_elements = (per_run + kBlock - 1) / kBlock * kBlock;
    const int64_t scales = (2 * (run_elements / kBlock) + 15) / 16 * 16;
    const int64_t run_bytes = scales + (run_elements + 15) / 16 * 16;
    plan->layout = {num_elements, runs, run_elements, run_bytes, "int8", kBlock, scales, 1, 1};
    plan->mean_layout = plan->layout;
    plan->num_chunks = num_chunks;
    plan->num_phases = size == 1 ? 0 : size == 2 ? 1 : 2;
    plan->window = kWindow;
    plan->schedule = diloco::make_schedule(static_cast<int>(num_chunks),
                                           static_cast<int>(plan->num_phases), lanes, kWindow);
    return plan;
}

inline at::Tensor input(int rank, int64_t num_elements) {
    return at::arange(num_elements, at::kFloat).add(rank * 100.0f).sin();
}

inline JobPtr make_job(const std::shared_ptr<Plan>& plan, int size, const at::Tensor& x,
                       int64_t round) {
    auto job = std::make_shared<Job>();
    job->plan = plan;
    job->header.kind = static_cast<uint8_t>(Kind::kSync);
    job->header.num_elements = plan->layout.num_elements;
    job->header.round = round;
    const int64_t bytes = plan->layout.num_runs * plan->layout.run_bytes;
    job->payload = diloco::empty_pages(bytes);
    if (size > 1) job->result = diloco::empty_pages(bytes);
    job->encode.outer = c10::IValue();
    c10::List<at::Tensor> params;
    params.push_back(x);
    job->encode.params = params;
    job->encode_bad = at::zeros({1}, at::kLong);
    job->reduce_bad = at::zeros({1}, at::kLong);
    return job;
}

inline void wait(Job& job) {
    std::unique_lock<std::mutex> lock(job.mutex);
    EXPECT(job.changed.wait_for(lock, std::chrono::seconds(60), [&] { return job.is_done; }));
}

// What the ranks share: mailboxes for an epoch's groups.
struct World {
    explicit World(int size, int lanes = 1) : size(size), lanes(lanes) { new_epoch(); }

    void new_epoch() {
        mailboxes.clear();
        for (int i = 0; i < 2 * lanes; ++i) mailboxes.push_back(std::make_shared<Mailbox>());
    }

    void attach(Engine& engine, int rank, int64_t epoch) {
        std::vector<BackendPtr> groups;
        if (size > 1) {
            for (const auto& mailbox : mailboxes) {
                groups.push_back(c10::make_intrusive<LoopbackBackend>(mailbox, rank, size));
            }
        }
        diloco::Membership membership{epoch, rank, {}};
        for (int i = 0; i < size; ++i) membership.replicas.push_back(i);
        engine.attach(membership, groups);
    }

    void run(const std::function<void(int)>& body) {
        std::vector<std::thread> threads;
        for (int rank = 0; rank < size; ++rank) threads.emplace_back(body, rank);
        for (auto& thread : threads) thread.join();
    }

    int size;
    int lanes;
    std::vector<std::shared_ptr<Mailbox>> mailboxes;
};

inline diloco::EngineOptions options() { return {std::chrono::seconds(20)}; }

}  // namespace diloco_test
