// The end of an epoch before the group changes: what a rank has voted for by then is final.
#include <ATen/Functions.h>

#include <limits>
#include <random>
#include <thread>

#include "engine_world.h"
#include "exchange/engine/control.h"

using namespace std::chrono_literals;
using diloco::Engine;
using diloco::JobPtr;
using diloco::Plan;
using diloco::Standing;
using diloco_test::input;
using diloco_test::kWindow;
using diloco_test::make_job;
using diloco_test::make_plan;
using diloco_test::wait;
using diloco_test::World;

namespace {

constexpr int64_t kElements = 3000;

std::vector<std::unique_ptr<Engine>> make_engines(World& world, const Plan& plan) {
    std::vector<std::unique_ptr<Engine>> engines;
    for (int rank = 0; rank < world.size; ++rank) {
        engines.push_back(std::make_unique<Engine>(diloco_test::options()));
        world.attach(*engines.back(), rank, 1);
        engines.back()->reserve_staging(kWindow * world.size * plan.layout.run_bytes);
    }
    return engines;
}

// How often a rank has told anybody its vote for the first job.
int num_told(World& world, int rank) {
    diloco_test::Mailbox& up = *world.mailboxes[0];
    diloco_test::Mailbox& down = *world.mailboxes[1];
    int sum = 0;
    for (diloco_test::Mailbox* mailbox : {&up, &down}) {
        std::lock_guard<std::mutex> lock(mailbox->mutex);
        for (const auto& [address, count] : mailbox->num_sent) {
            const auto& [from, to, tag] = address;
            if (from == rank && tag == diloco::vote_tag(0)) sum += count;
        }
    }
    return sum;
}

bool is_refused(Engine& engine, const JobPtr& job) {
    try {
        engine.start(job);
    } catch (const c10::Error& error) {
        const std::string text = error.what_without_backtrace();
        return text.find("a change of the group has begun") != std::string::npos &&
               text.find("change_group()") != std::string::npos;
    }
    return false;
}

// What waits for a peer ends, what is queued is not begun, and the next epoch starts afresh.
void test_seal_ends_what_is_under_way() {
    World world(2);
    const auto plan = make_plan(kElements, 2, 3, 1);
    const auto engines = make_engines(world, *plan);
    const JobPtr first = make_job(plan, 2, input(0, kElements), 0);
    const JobPtr second = make_job(plan, 2, input(0, kElements), 1);
    engines[0]->start(first);
    engines[0]->start(second);
    engines[0]->seal();
    for (const JobPtr& job : {first, second}) {
        EXPECT(job->is_done && job->failure.has_value());
        EXPECT(job->failure->kind == "SyncError" && job->failure->missing.empty());
        EXPECT(job->standing == Standing::kNone);
    }
    EXPECT(num_told(world, 0) == 0);
    EXPECT(is_refused(*engines[0], make_job(plan, 2, input(0, kElements), 2)));
    engines[0]->seal();
    engines[1]->seal();
    EXPECT(is_refused(*engines[1], make_job(plan, 2, input(1, kElements), 0)));
    world.new_epoch();
    for (int rank = 0; rank < 2; ++rank) world.attach(*engines[rank], rank, 2);
    world.run([&](int rank) {
        const JobPtr job = make_job(plan, 2, input(rank, kElements), 0);
        engines[rank]->start(job);
        wait(*job);
        EXPECT(!job->failure.has_value() && job->standing == Standing::kAgreed);
    });
}

// A peer that fails before its vote, and one whose vote is a bad one.
void test_standing(bool is_bad) {
    World world(3);
    const auto plan = make_plan(kElements, 3, 4, 1);
    const auto engines = make_engines(world, *plan);
    if (!is_bad) engines[1]->inject_fault({"fail", "vote", -1, 0, 0.0, 0});
    world.run([&](int rank) {
        at::Tensor x = input(rank, kElements);
        if (is_bad && rank == 1) x[7] = std::numeric_limits<float>::quiet_NaN();
        const JobPtr job = make_job(plan, 3, x, 0);
        engines[rank]->start(job);
        wait(*job);
        EXPECT(job->failure.has_value());
        if (is_bad) {
            EXPECT(job->failure->kind == "NonFiniteError" && job->standing == Standing::kRejected);
        } else if (rank == 1) {
            EXPECT(job->standing == Standing::kNone && num_told(world, 1) == 0);
        } else {
            // One of them may be told of the failure by the other before it votes.
            const bool has_told = num_told(world, rank) > 0;
            EXPECT(job->standing == Standing::kVoted || !has_told);
        }
    });
}

// Rank 0 seals at any moment of an exchange: a vote leaves before that, and is owned up to, or
// never; and who has all votes has them from ranks that say that they have voted.
void test_no_vote_leaves_after_a_seal(int size, int num_tries) {
    std::mt19937_64 random(17);
    const auto plan = make_plan(kElements, size, 2, 1);
    for (int i = 0; i < num_tries; ++i) {
        World world(size);
        const auto engines = make_engines(world, *plan);
        std::vector<JobPtr> jobs;
        for (int rank = 0; rank < size; ++rank) {
            jobs.push_back(make_job(plan, size, input(rank, kElements), 0));
            engines[rank]->inject_fault({"", "", -1, 0, 200.0, random()});
        }
        std::uniform_int_distribution<int> microseconds(0, 2500);
        const std::chrono::microseconds pause(microseconds(random));
        int told_at_seal = 0;
        world.run([&](int rank) {
            engines[rank]->start(jobs[rank]);
            if (rank == 0) {
                std::this_thread::sleep_for(pause);
                engines[0]->seal();
                EXPECT(jobs[0]->is_done);
                told_at_seal = num_told(world, 0);
            }
            wait(*jobs[rank]);
        });
        const Standing standing = jobs[0]->standing;
        EXPECT(num_told(world, 0) == told_at_seal);
        EXPECT(told_at_seal == 0 || standing != Standing::kNone);
        for (const JobPtr& job : jobs) {
            EXPECT(job->standing != Standing::kAgreed || standing != Standing::kNone);
            EXPECT(job->failure.has_value() == (job->standing != Standing::kAgreed));
        }
    }
}

}  // namespace

int main() {
    test_seal_ends_what_is_under_way();
    test_standing(false);
    test_standing(true);
    test_no_vote_leaves_after_a_seal(2, 100);
    test_no_vote_leaves_after_a_seal(3, 100);
    return passed("seal");
}
