#include "scenarios.h"

namespace agreement {
namespace {

const Record* in_table(const State& s, int place = 0) {
    return s.tables[place] == kNone ? nullptr : &s.records[s.tables[place]];
}

// All of a set live in the record that the table holds, unsealed, and the set are its members.
bool trains(const State& s, Set members, int place = 0) {
    const Record* record = in_table(s, place);
    if (record == nullptr || record->number == 0 || record->members != members) return false;
    for (int i = 0; i < kProcesses; ++i) {
        const Process& p = s.processes[i];
        if (!has(members, i)) continue;
        if (!p.is_up() || p.is_sealed() || p.entered != s.tables[place]) return false;
    }
    return true;
}

const Attempt* attempt_of(const State& s, int proposer, Set members) {
    for (const Attempt& attempt : s.attempts) {
        const bool is_it = attempt.proposer == proposer && attempt.members == members;
        if (attempt.stage != kFree && is_it) return &attempt;
    }
    return nullptr;
}

bool is_swapped(const State& s, Set members) {
    const Record* record = in_table(s);
    return record != nullptr && record->number > 0 && record->members == members;
}

bool nothing(const State&) { return false; }

// Living processes are in two records that follow the first one.
bool is_split(const State& s) {
    Set inhabited = 0;
    for (const Process& p : s.processes) {
        const bool is_in = p.is_up() && p.entered != kNone;
        if (is_in && s.records[p.entered].number == 1) inhabited |= bit(p.entered);
    }
    return size(inhabited) > 1;
}

constexpr Set kAll = bit(0) | bit(1) | bit(2);
constexpr Set k01 = bit(0) | bit(1);
constexpr Set k12 = bit(1) | bit(2);

}  // namespace

const std::vector<Scenario>& all_scenarios() {
    static const std::vector<Scenario> scenarios = {
        {"no-way",
         "1 and 2 have no way to each other, all SEALED have come: a smaller group",
         3,
         "cut",
         "cuts=2",
         {"process 0 seals, PREPARE {0,1,2} on record 0",
          "process 1 answers SEALED to 0 for {0,1,2}", "process 2 answers SEALED to 0 for {0,1,2}",
          "process 0 answers READY to 0 for {0,1,2}"},
         [](const State& s) { return trains(s, k01); },
         [](const State& s) { return is_swapped(s, kAll); },
         Mutant::kNoReady},
        {"opened-unheard",
         "0 and 1 are READY, 2 has never heard 1: 0 does not swap",
         3,
         "cut",
         "",
         {"process 0 seals, PREPARE {0,1,2} on record 0",
          "process 1 answers SEALED to 0 for {0,1,2}", "process 2 answers SEALED to 0 for {0,1,2}",
          "process 1 answers READY to 0 for {0,1,2}"},
         [](const State& s) { return trains(s, k01) && s.is_cut; },
         [](const State& s) {
             const Attempt* attempt = attempt_of(s, 0, kAll);
             return attempt != nullptr && attempt->record != kNone && attempt->readies == k01;
         },
         Mutant::kNoReady},
        {"sealed-died-restarted",
         "1 answers SEALED, dies, starts again as process 2",
         2,
         "restart",
         "last=3",
         {"process 0 seals, PREPARE {0,1} on record 0", "process 1 answers SEALED to 0 for {0,1}",
          "process 1 dies", "process 2 starts with number 1 and a checkpoint at step 0"},
         [](const State& s) { return trains(s, Set(bit(0) | bit(2))); },
         [](const State& s) {
             const Process& p = s.processes[2];
             return p.number == 1 && (attempt_of(s, 0, k01) != nullptr) && p.is_sealed() &&
                    p.entered == kNone;
         },
         Mutant::kNoNonce},
        {"late-vote-to-a-zombie",
         "the last vote reaches 1 after 0 has gone on without 1",
         2,
         "",
         "",
         {"process 1 votes in stream 0", "process 0 votes in stream 0",
          "process 0 seals, PREPARE {0} on record 0", "process 0 swaps record 0 for {0}",
          "process 1 hears all votes of stream 0 and applies"},
         [](const State& s) { return s.processes[1].life == kEnded && is_swapped(s, bit(0)); },
         [](const State& s) {
             return is_swapped(s, bit(0)) && in_table(s)->number == 1 &&
                    in_table(s)->commits == 0 && s.processes[1].entered == 0 &&
                    has(s.applied[0][0], 1);
         },
         Mutant::kAppliedOnly},
        {"repeated-frame",
         "a relay repeats a vote of the record before",
         2,
         "repeat,rounds",
         "",
         {"process 0 votes in stream 0", "process 1 votes in stream 0",
          "process 0 seals, PREPARE {0,1} on record 0", "process 1 answers SEALED to 0 for {0,1}",
          "process 0 swaps record 0 for {0,1}", "process 1 hears OPEN of record 1 and enters"},
         [](const State& s) { return trains(s, k01) && s.applied[1][0] == k01; },
         [](const State& s) {
             return s.applied[1][0] != 0 && s.voted[1][0] != s.records[1].members;
         },
         Mutant::kOldVotes},
        {"devices-of-two",
         "the devices of 0 connect, those of 1 and 2 do not: another attempt",
         3,
         "cut",
         "cuts=2",
         {"process 0 seals, PREPARE {0,1,2} on record 0",
          "process 1 answers SEALED to 0 for {0,1,2}", "process 2 answers SEALED to 0 for {0,1,2}",
          "process 0 answers READY to 0 for {0,1,2}", "process 0 withdraws {0,1,2}"},
         [](const State& s) { return trains(s, k01); },
         [](const State& s) { return is_swapped(s, kAll); },
         Mutant::kNoReady},
        {"two-demands",
         "the caller of 0 names {0,1}, the caller of 1 names {1}",
         2,
         "demand",
         "newcomers=0",
         {"process 0 is told change_group {0,1}", "process 1 is told change_group {1}",
          "process 0 seals, PREPARE {0,1} on record 0", "process 1 answers NO to 0 for {0,1}"},
         [](const State& s) { return s.processes[0].life == kEnded && trains(s, bit(1)); },
         is_split,
         Mutant::kBlindSwap},
        {"two-stores",
         "1 and 2 are told of another store, 0 is told later: nobody goes on in both",
         3,
         "move",
         "last=1",
         {"process 1 is told of another store", "process 2 is told of another store",
          "process 1 seals, PREPARE {1,2} on record 0", "process 2 answers SEALED to 1 for {1,2}"},
         [](const State& s) { return trains(s, k12, 1) && s.tables[0] == 0; },
         is_split,
         Mutant::kNewTableMajority},
        {"out-in-out",
         "a member is slower than the others wait: out, in, and out again",
         2,
         "zombie",
         "last=3",
         {"process 0 seals, PREPARE {0} on record 0", "process 0 swaps record 0 for {0}",
          "process 1 reads record 1 and is fenced",
          "process 2 starts with number 1 and a checkpoint at step 0",
          "process 2 follows record 1 and is ready"},
         [](const State& s) {
             const Record* record = in_table(s);
             return record != nullptr && record->number == 3 && record->members == bit(0) &&
                    s.processes[2].life == kEnded;
         },
         nothing,
         Mutant::kBlindSwap},
        {"beats-without-bulk",
         "a member that lives is left out, and nobody dies",
         2,
         "",
         "",
         {"process 0 votes in stream 0", "process 0 seals, PREPARE {0} on record 0",
          "process 0 swaps record 0 for {0}", "process 1 votes in stream 0"},
         [](const State& s) { return trains(s, bit(0)) && s.processes[1].life == kEnded; },
         [](const State& s) {
             return is_swapped(s, bit(0)) && in_table(s)->number == 1 &&
                    in_table(s)->commits == 0 && s.applied[0][0] != 0;
         },
         Mutant::kNoPromise},
        {"a-way-goes",
         "the way between 1 and 2 goes after 1 is READY, before 2 is",
         3,
         "cut",
         "",
         {"process 0 seals, PREPARE {0,1,2} on record 0",
          "process 1 answers SEALED to 0 for {0,1,2}", "process 2 answers SEALED to 0 for {0,1,2}",
          "process 1 answers READY to 0 for {0,1,2}",
          "the way between the last two members is cut"},
         [](const State& s) { return trains(s, bit(0) | bit(2)) && s.is_cut; },
         [](const State& s) {
             const Attempt* attempt = attempt_of(s, 0, kAll);
             return s.is_cut && attempt != nullptr && attempt->record != kNone &&
                    attempt->readies == k01;
         },
         Mutant::kNoReady},
        {"decides-otherwise",
         "one stream commits and the other is void, and all that enter agree",
         2,
         "streams",
         "",
         {"process 0 votes in stream 1", "process 1 votes in stream 1",
          "process 1 votes in stream 0", "process 1 hears all votes of stream 1 and applies"},
         [](const State& s) { return trains(s, k01) && in_table(s)->commits == 2; },
         [](const State& s) {
             // Somebody has applied in the base a round that the record makes void.
             return is_swapped(s, k01) && s.processes[0].entered == 0 &&
                    !has(in_table(s)->commits, 1) && s.applied[0][1] != 0;
         },
         Mutant::kOneMeet},
        {"opposite-views",
         "0 asks {0,1}, 2 asks {1,2}, and the table forgets",
         3,
         "forget",
         "",
         {"process 0 seals, PREPARE {0,1} on record 0",
          "process 2 seals, PREPARE {1,2} on record 0", "process 1 answers SEALED to 0 for {0,1}",
          "the table forgets"},
         [](const State& s) { return trains(s, k01) || trains(s, k12); },
         is_split,
         Mutant::kNewTableMajority},
    };
    return scenarios;
}

}  // namespace agreement
