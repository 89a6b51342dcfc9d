// What follows from the members' reports, and the largest set that reaches each other.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "exchange/failure/verdict.h"

using diloco::Cuts;
using diloco::Report;
using diloco::Reports;
using diloco::Verdict;
using Ids = std::vector<int64_t>;

namespace {

Report here(bool is_idle = false, bool waited_in_vain = false) {
    Report report;
    report.is_here = true;
    report.is_idle = is_idle;
    report.waited_in_vain = waited_in_vain;
    return report;
}

Report ways(Ids reached, Ids unreached) {
    Report report = here();
    report.has_tried = true;
    report.reached = std::move(reached);
    report.unreached = std::move(unreached);
    return report;
}

bool operator==(const Verdict& a, const Verdict& b) { return to_text(a) == to_text(b); }

void test_silent_and_left() {
    Reports reports{{0, here()}, {1, Report()}, {2, here(true)}, {5, here()}, {7, Report()}};
    reports[5].has_left = true;
    reports[5].inner_step = 70;
    const Verdict verdict = diloco::decide(reports);
    EXPECT(verdict.survivors == (Ids{0, 2}));
    EXPECT(verdict.missing == (Ids{1, 5, 7}));
    EXPECT(verdict.silent == (Ids{1, 7}) && verdict.idle == Ids{2});
    EXPECT(verdict.left.size() == 1 && verdict.left[0].replica == 5);
    EXPECT(diloco::verdict_from_text(diloco::to_text(verdict)) == verdict);
}

// Who trains while others wait in vain for its header is missing only when everybody lives.
void test_idle() {
    EXPECT(diloco::decide({{0, here(false, true)}, {1, here(true)}}).missing == Ids{1});
    EXPECT(diloco::decide({{0, here()}, {1, here(true)}}).missing.empty());
    const Verdict with_dead =
        diloco::decide({{0, here(false, true)}, {1, here(true)}, {2, Report()}});
    EXPECT(with_dead.missing == Ids{2} && with_dead.survivors == (Ids{0, 1}));
}

// A member that goes on without others says so before its connections end.
void test_left_out() {
    Report gone = here(true);
    gone.goes_on_with = {0, 3, 9};
    Reports reports{{0, gone}, {1, here()}, {2, here(true)}, {3, Report()}};
    const Verdict verdict = diloco::decide(reports);
    EXPECT(verdict.survivors == Ids{0} && verdict.missing == (Ids{1, 2, 3}));
    EXPECT(verdict.left_out == (Ids{1, 2}) && verdict.silent == Ids{3});
    EXPECT(diloco::report_from_text(diloco::to_text(gone)).goes_on_with == gone.goes_on_with);
    EXPECT(diloco::verdict_from_text(diloco::to_text(verdict)) == verdict);
    // The report of a member that has died since counts no more.
    reports[0].is_here = false;
    EXPECT(diloco::decide(reports).survivors == (Ids{1, 2}));
}

void test_cuts() {
    // Both say so, one says so and the other has not tried, and one way of two works.
    EXPECT(diloco::find_cuts({{1, ways({}, {2})}, {2, ways({}, {1})}}) == (Cuts{{1, 2}}));
    EXPECT(diloco::find_cuts({{1, ways({}, {2})}, {2, here()}}) == (Cuts{{1, 2}}));
    EXPECT(diloco::find_cuts({{1, ways({}, {2})}, {2, ways({1}, {})}}).empty());
    EXPECT(diloco::find_cuts({{1, here()}, {2, here()}}).empty());
    const Verdict verdict = diloco::decide(
        {{0, ways({1, 2}, {3})}, {1, ways({0}, {2, 3})}, {2, ways({0}, {1, 3})}, {3, Report()}});
    // The dead one is not cut off, though nobody reaches it.
    EXPECT(verdict.cuts == (Cuts{{1, 2}}) && verdict.silent == Ids{3});
    EXPECT(verdict.survivors == (Ids{0, 1}) && verdict.missing == (Ids{2, 3}));
    EXPECT(diloco::verdict_from_text(diloco::to_text(verdict)) == verdict);
}

void test_reports_as_text() {
    Report left;
    left.has_left = true;
    left.inner_step = 70;
    for (const Report& report :
         {Report(), here(), here(true), here(false, true), ways({}, {}), ways({1, 2}, {3}), left}) {
        const Report read = diloco::report_from_text(diloco::to_text(report));
        EXPECT(read.is_here == report.is_here && read.is_idle == report.is_idle);
        EXPECT(read.waited_in_vain == report.waited_in_vain && read.has_left == report.has_left);
        EXPECT(read.has_tried == report.has_tried && read.inner_step == report.inner_step);
        EXPECT(read.reached == report.reached && read.unreached == report.unreached);
    }
    EXPECT(diloco::to_text(Report()).empty());
}

// The best of all subsets, each tried.
Ids best_by_force(int num_members, const Cuts& cuts) {
    Ids best;
    for (uint32_t set = 0; set < (1U << num_members); ++set) {
        const bool is_whole = std::none_of(cuts.begin(), cuts.end(), [&](const auto& cut) {
            return (set >> cut.first & 1) && (set >> cut.second & 1);
        });
        if (!is_whole) continue;
        Ids ids;
        for (int64_t i = 0; i < num_members; ++i) {
            if (set >> i & 1) ids.push_back(i);
        }
        if (ids.size() > best.size() || (ids.size() == best.size() && ids < best)) best = ids;
    }
    return best;
}

void test_every_graph_of_five() {
    constexpr int kMembers = 5;
    Ids members;
    Cuts pairs;
    for (int64_t a = 0; a < kMembers; ++a) {
        members.push_back(a);
        for (int64_t b = a + 1; b < kMembers; ++b) pairs.emplace_back(a, b);
    }
    for (uint32_t graph = 0; graph < (1U << pairs.size()); ++graph) {
        Cuts cuts;
        for (size_t i = 0; i < pairs.size(); ++i) {
            if (graph >> i & 1) cuts.push_back(pairs[i]);
        }
        EXPECT(diloco::largest_reaching(members, cuts) == best_by_force(kMembers, cuts));
    }
}

// Cuts of others, and a cut between two large sites, which must not take for ever.
void test_large() {
    EXPECT(diloco::largest_reaching({1, 4}, {{0, 1}, {2, 3}}) == (Ids{1, 4}));
    Ids members;
    Cuts cuts;
    for (int64_t i = 0; i < 1000; ++i) members.push_back(i);
    for (int64_t a = 0; a < 499; ++a) {
        for (int64_t b = 499; b < 1000; ++b) cuts.emplace_back(a, b);
    }
    EXPECT(diloco::largest_reaching(members, cuts).size() == 501);
}

}  // namespace

int main() {
    test_silent_and_left();
    test_idle();
    test_left_out();
    test_cuts();
    test_every_graph_of_five();
    test_large();
    test_reports_as_text();
    return passed("verdict");
}
