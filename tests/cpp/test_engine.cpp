// The engine with its ranks as threads of one process: results, failures, shutdown.
#include <ATen/Functions.h>

#include <cmath>
#include <functional>
#include <thread>

#include "engine_world.h"
#include "exchange/engine/operator_calls.h"

using namespace std::chrono_literals;
using diloco::Engine;
using diloco::JobPtr;
using diloco::Plan;
using diloco_test::input;
using diloco_test::kWindow;
using diloco_test::make_job;
using diloco_test::make_plan;
using diloco_test::options;
using diloco_test::wait;
using diloco_test::World;

namespace {

// The same operators, called one after the other.
at::Tensor expected_result(const std::shared_ptr<Plan>& plan, int size) {
    std::vector<JobPtr> jobs;
    for (int rank = 0; rank < size; ++rank) {
        jobs.push_back(make_job(plan, size, input(rank, plan->layout.num_elements), 0));
        jobs.back()->weights.assign(static_cast<size_t>(size), float(1.0 / size));
        diloco::call_encode(*jobs.back(), 0, plan->layout.num_elements);
    }
    const int64_t stride = plan->layout.run_bytes;
    const at::Tensor received = at::zeros({size * stride}, at::kByte);
    at::Tensor result = at::zeros_like(jobs[0]->payload);
    for (int64_t run = 0; run < plan->layout.num_runs; ++run) {
        if (plan->layout.run_length(run) == 0) continue;
        for (int rank = 0; rank < size; ++rank) {
            received.narrow(0, rank * stride, stride)
                .copy_(jobs[static_cast<size_t>(rank)]->payload.narrow(0, run * stride, stride));
        }
        at::Tensor values;
        diloco::call_reduce(*jobs[0], received, result.narrow(0, run * stride, stride), run, 0,
                            values);
    }
    return result;
}

void test_results(int size, int64_t num_elements, int64_t num_chunks, int lanes, double delay_us,
                  double gbps) {
    World world(size, lanes);
    const auto plan = make_plan(num_elements, size, num_chunks, lanes);
    const at::Tensor expected = size > 2 ? expected_result(plan, size) : at::Tensor();
    world.run([&](int rank) {
        Engine engine(options());
        world.attach(engine, rank, 1);
        engine.reserve_staging(kWindow * size * plan->layout.run_bytes);
        engine.inject_fault({"", "", -1, 0, delay_us, uint64_t(rank)});
        if (gbps > 0) engine.emulate_link(gbps, 0.2);
        for (int64_t round = 0; round < 3; ++round) {
            const JobPtr job = make_job(plan, size, input(rank, num_elements), round);
            engine.start(job);
            wait(*job);
            EXPECT(!job->failure.has_value());
            EXPECT(job->headers.size() == static_cast<size_t>(size));
            if (size > 2) EXPECT(at::equal(job->result, expected));
            if (size == 2) {
                const JobPtr other = make_job(plan, size, input(1 - rank, num_elements), 0);
                diloco::call_encode(*other, 0, num_elements);
                EXPECT(at::equal(job->result, other->payload));
            }
        }
        engine.close(5s);
    });
}

void test_queue_of_jobs() {
    World world(3);
    const auto plan = make_plan(5000, 3, 4, 1);
    const at::Tensor expected = expected_result(plan, 3);
    world.run([&](int rank) {
        Engine engine(options());
        world.attach(engine, rank, 1);
        engine.reserve_staging(kWindow * 3 * plan->layout.run_bytes);
        std::vector<JobPtr> jobs;
        for (int64_t round = 0; round < 6; ++round) {
            jobs.push_back(make_job(plan, 3, input(rank, 5000), round));
            engine.start(jobs.back());
        }
        for (const JobPtr& job : jobs) {
            wait(*job);
            EXPECT(!job->failure.has_value() && at::equal(job->result, expected));
        }
        engine.close(5s);
    });
}

// Rank 1 fails in the middle; the others lose connections; all go on in a new epoch.
void test_failure_and_new_epoch() {
    World world(3);
    const auto plan = make_plan(5000, 3, 6, 1);
    std::vector<std::unique_ptr<Engine>> engines;
    for (int rank = 0; rank < 3; ++rank) {
        engines.push_back(std::make_unique<Engine>(options()));
        world.attach(*engines.back(), rank, 1);
        engines.back()->reserve_staging(kWindow * 3 * plan->layout.run_bytes);
    }
    engines[1]->inject_fault({"fail", "reduce", 2, 0, 0.0, 0});
    world.run([&](int rank) {
        const JobPtr job = make_job(plan, 3, input(rank, 5000), 0);
        engines[static_cast<size_t>(rank)]->start(job);
        wait(*job);
        EXPECT(job->failure.has_value() && job->failure->kind == "SyncError");
        // A rank that has lost rank 1 may be lost to the other one before.
        EXPECT(job->failure->missing.size() == (rank == 1 ? 0 : 1));
        EXPECT(engines[static_cast<size_t>(rank)]->dead_failure().has_value());
    });
    world.new_epoch();
    for (int rank = 0; rank < 3; ++rank) world.attach(*engines[static_cast<size_t>(rank)], rank, 2);
    world.run([&](int rank) {
        const JobPtr job = make_job(plan, 3, input(rank, 5000), 0);
        engines[static_cast<size_t>(rank)]->start(job);
        wait(*job);
        EXPECT(!job->failure.has_value());
        engines[static_cast<size_t>(rank)]->close(5s);
    });
}

// A peer that waits learns from its connection alone that rank 0 has closed.
void test_close_ends_the_connections() {
    World world(2);
    const auto plan = make_plan(1000, 2, 2, 1);
    world.run([&](int rank) {
        Engine engine(options());
        world.attach(engine, rank, 1);
        if (rank == 0) {
            engine.close(1s);
            return;
        }
        const JobPtr job = make_job(plan, 2, input(rank, 1000), 0);
        engine.start(job);
        wait(*job);
        EXPECT(job->failure.has_value() && job->failure->kind == "SyncError");
        EXPECT(job->failure->missing == std::vector<int64_t>{0});
        EXPECT(!job->awaited.has_value());
    });
}

// A running job says for which header it waits, and a seal from another thread ends the job.
void test_seal_of_a_job_that_waits() {
    World world(3);
    const auto plan = make_plan(1000, 3, 2, 1);
    Engine alone(options());
    world.attach(alone, 1, 1);
    EXPECT(!alone.dead_failure().has_value());
    const JobPtr job = make_job(plan, 3, input(1, 1000), 0);
    alone.start(job);
    const auto awaited = [&] {
        std::lock_guard<std::mutex> lock(job->mutex);
        return job->awaited;
    };
    while (awaited() != 0) std::this_thread::yield();
    std::thread([&] { alone.seal(); }).join();
    EXPECT(job->is_done && job->failure->missing.empty() && !awaited());
    EXPECT(job->failure->message.find(diloco::kSealed) != std::string::npos);
    EXPECT(alone.dead_failure()->message == job->failure->message);
}

// Encodes a job, looks at what is encoded, and sends it: as zeros of weight 0 where it is bad.
JobPtr start_and_ship(Engine& engine, const std::shared_ptr<Plan>& plan, at::Tensor x, bool is_bad,
                      int64_t round) {
    if (is_bad) x[0] = std::nan("");
    const JobPtr job = make_job(plan, 3, x, round);
    job->is_held = true;
    engine.start(job);
    EXPECT(!job->is_done && job->headers.empty());
    EXPECT((job->encode_bad.item<int64_t>() > 0) == is_bad);
    if (is_bad) job->payload.zero_();
    engine.ship(job, is_bad);
    return job;
}

// A rank whose values are bad is left out; when all are, there is nothing to average.
void test_held_jobs() {
    World world(3);
    const auto plan = make_plan(5000, 3, 4, 1);
    world.run([&](int rank) {
        Engine engine(options());
        world.attach(engine, rank, 1);
        engine.reserve_staging(kWindow * 3 * plan->layout.run_bytes);
        const JobPtr one = start_and_ship(engine, plan, input(rank, 5000), rank == 1, 0);
        const JobPtr all = start_and_ship(engine, plan, input(rank, 5000), true, 1);
        const JobPtr none = start_and_ship(engine, plan, input(rank, 5000), false, 2);
        for (const JobPtr& job : {one, all, none}) wait(*job);
        EXPECT(!one->failure.has_value() && one->weights == std::vector<double>({0.5, 0.0, 0.5}));
        EXPECT((one->headers[1].flags & diloco::kReset) && !(one->headers[2].flags & 2));
        EXPECT(all->failure.has_value() && all->failure->kind == "NonFiniteError");
        EXPECT(all->failure->replicas == std::vector<int64_t>({0, 1, 2}));
        EXPECT(!none->failure.has_value() && at::equal(none->result, expected_result(plan, 3)));
        engine.close(5s);
    });
}

// The epoch dies while a job is held: the job fails, rather than nobody knowing of it.
void test_job_held_while_the_epoch_dies() {
    World world(3);
    const auto plan = make_plan(5000, 3, 4, 1);
    world.run([&](int rank) {
        Engine engine(options());
        world.attach(engine, rank, 1);
        engine.reserve_staging(kWindow * 3 * plan->layout.run_bytes);
        const JobPtr held = make_job(plan, 3, input(rank, 5000), 1);
        held->is_held = true;
        engine.start(held);
        if (rank == 1) engine.inject_fault({"fail", "reduce", 2, 0, 0.0, 0});
        const JobPtr other = make_job(plan, 3, input(rank, 5000), 0);
        engine.start(other);
        wait(*other);
        EXPECT(other->failure.has_value());
        engine.ship(held, false);
        wait(*held);
        EXPECT(held->failure.has_value() && held->failure->kind == "SyncError");
        engine.close(5s);
    });
}

// The next epoch does not wait for ever for a job of the last one.
void test_attach_while_a_job_runs() {
    World world(1);
    const auto plan = make_plan(1000, 1, 2, 1);
    Engine engine({50ms});
    world.attach(engine, 0, 1);
    const JobPtr job = make_job(plan, 1, input(0, 1000), 0);
    engine.submit(job);  // and not encoded
    bool is_refused = false;
    try {
        world.attach(engine, 0, 2);
    } catch (const c10::Error& error) {
        is_refused = std::string(error.what()).find("still under way") != std::string::npos;
    }
    EXPECT(is_refused);
    job->announce(2);
    wait(*job);
    EXPECT(!job->failure.has_value());
    world.attach(engine, 0, 2);
}

// close() comes while the next epoch waits for a job of the last one.
void test_close_while_attach_waits() {
    World world(1);
    const auto plan = make_plan(1000, 1, 2, 1);
    Engine engine(options());
    world.attach(engine, 0, 1);
    const JobPtr job = make_job(plan, 1, input(0, 1000), 0);
    engine.submit(job);  // and not encoded
    std::string why;
    std::thread attaching([&] {
        try {
            world.attach(engine, 0, 2);
        } catch (const c10::Error& error) {
            why = error.what_without_backtrace();
        }
    });
    std::thread closing([&] { engine.close(20s); });
    try {
        while (true) {
            const JobPtr other = make_job(plan, 1, input(0, 1000), 1);
            other->announce(2);
            engine.submit(other);
            std::this_thread::sleep_for(1ms);
        }
    } catch (const c10::Error&) {
        // It is closing.
    }
    job->announce(2);
    attaching.join();
    closing.join();
    EXPECT(why == "this DiLoCo is closed");
}

// Two ranks post all chunks at once, and stop doing so at the deadline.
void test_deadline_while_posting() {
    World world(2);
    const auto plan = make_plan(1000, 2, 5, 1);
    world.run([&](int rank) {
        Engine engine({1000ms});
        world.attach(engine, rank, 1);
        const JobPtr job = make_job(plan, 2, input(rank, 1000), 0);
        engine.submit(job);
        std::this_thread::sleep_for(1500ms);
        job->announce(plan->layout.num_runs);
        wait(*job);
        EXPECT(job->failure.has_value() && job->failure->stage == "post_exchange");
        engine.close(5s);
    });
}

// What torch throws carries a C++ stack, which is not for the user.
void test_error_of_an_operator() {
    World world(3);
    const auto plan = make_plan(1000, 3, 1, 1);
    const auto wrong = std::make_shared<Plan>(*plan);
    wrong->impl = "none";
    world.run([&](int rank) {
        Engine engine(options());
        world.attach(engine, rank, 1);
        engine.reserve_staging(kWindow * 3 * plan->layout.run_bytes);
        const JobPtr job = make_job(wrong, 3, input(rank, 1000), 0);
        const JobPtr encoding = make_job(plan, 3, input(rank, 1000), 0);
        encoding->payload = job->payload;
        diloco::call_encode(*encoding, 0, 1000);
        job->announce(plan->layout.num_runs);
        engine.submit(job);
        wait(*job);
        EXPECT(job->failure.has_value());
        EXPECT(job->failure->message.find("Exception raised from") == std::string::npos);
        engine.close(5s);
    });
}

// Nothing waits while a job runs when a later one needs a larger receive buffer.
void test_larger_job_while_one_runs() {
    World world(3);
    const std::vector<std::shared_ptr<Plan>> plans{make_plan(1000, 3, 1, 1),
                                                   make_plan(50000, 3, 4, 1)};
    world.run([&](int rank) {
        Engine engine(options());
        world.attach(engine, rank, 1);
        std::vector<JobPtr> jobs;
        for (const auto& plan : plans) {
            engine.reserve_staging(kWindow * 3 * plan->layout.run_bytes);
            jobs.push_back(make_job(plan, 3, input(rank, plan->layout.num_elements), 0));
            // The first is encoded only when the second is under way.
            if (jobs.size() == 1) engine.submit(jobs[0]);
        }
        engine.submit(jobs[1]);
        for (size_t i = 0; i < jobs.size(); ++i) {
            diloco::call_encode(*jobs[i], 0, plans[i]->layout.num_elements);
            jobs[i]->announce(plans[i]->layout.num_runs);
        }
        for (size_t i = 0; i < jobs.size(); ++i) {
            wait(*jobs[i]);
            EXPECT(!jobs[i]->failure.has_value());
            EXPECT(at::equal(jobs[i]->result, expected_result(plans[i], 3)));
        }
        engine.close(5s);
    });
}

// A job that waits for a peer that never comes does not hold up the end.
void test_close_while_waiting() {
    World world(2);
    const auto plan = make_plan(1000, 2, 2, 1);
    Engine alone(options());
    world.attach(alone, 0, 1);
    const JobPtr first = make_job(plan, 2, input(0, 1000), 0);
    const JobPtr second = make_job(plan, 2, input(0, 1000), 1);
    alone.start(first);
    alone.start(second);
    const auto begin = diloco::Clock::now();
    alone.close(100ms);
    EXPECT(diloco::Clock::now() - begin < 10s);
    EXPECT(first->is_done && first->failure.has_value());
    EXPECT(second->is_done && second->failure.has_value());
}

}  // namespace

int main() {
    for (const int size : {1, 2, 3, 5}) {
        test_results(size, 1, 1, 1, 0, 0);
        test_results(size, 4099, 5, 1, 0, 0);
        test_results(size, 20000, 9, 2, 50, 0);
        test_results(size, 20000, 7, 1, 0, 1.0);
    }
    test_queue_of_jobs();
    test_failure_and_new_epoch();
    test_close_ends_the_connections();
    test_seal_of_a_job_that_waits();
    test_close_while_waiting();
    test_held_jobs();
    test_job_held_while_the_epoch_dies();
    test_attach_while_a_job_runs();
    test_close_while_attach_waits();
    test_larger_job_while_one_runs();
    test_deadline_while_posting();
    test_error_of_an_operator();
    return passed("engine");
}
