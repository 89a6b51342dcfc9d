// The rules of the agreement as events: all that can happen in a state, and what each event breaks.
//
// Time is left out. A process may propose any set at any moment, whichever others the process
// suspects; a message that is sent may arrive at any later moment or never. So patience, ranks and
// the choice of the largest group (rules 1, 7, 8) appear here as "some process proposes some set".
//
// Votes, SEALED and READY are heard at the moment of use: all that were sent, or none. A message
// that was heard earlier would change nothing but what its receiver may do at that moment. So the
// states are fewer, and nothing is hidden.
#pragma once

#include "state.h"

namespace agreement {

enum class Act : uint8_t {
    kStarts,
    kVotes,
    kApplies,
    kReads,
    kIsFenced,
    kHearsOpen,
    kProposes,
    kSeals,
    kSaysNo,
    kIsReady,
    kAsks,
    kTableSwaps,
    kTableRefuses,
    kLearns,
    kWithdraws,
    kPlans,
    kFollows,
    kCopies,
    kIsTold,
    kFounds,
    kRevives,
    kEnds,
    kMoves,
    // Faults and wishes, on which nobody may rely:
    kDies,
    kWantsToLeave,
    kForgets,
    kLoses,
    kIsCut,
};
constexpr int kActs = int(Act::kIsCut) + 1;

struct Event {
    Act act;
    uint8_t i = 0;  // the process
    uint8_t x = 0;  // a record, stream, attempt's proposer, number or checkpoint
    Set set = 0;    // members
};

inline bool is_fault(Act act) { return act >= Act::kDies || act == Act::kStarts; }

const char* name_of(Act act);
std::string sentence(const Event& event);

class Rules {
  public:
    explicit Rules(const Config& config) : c(config) {}

    State start() const;

    // Calls emit(event, state after it, invariant that it breaks or nullptr) for all events.
    template <typename Emit>
    void successors(const State& s, Emit&& emit) const {
        for (int i = 0; i < kProcesses; ++i) {
            if (s.processes[i].is_up()) {
                round_events(s, i, emit);
                table_events(s, i, emit);
                proposal_events(s, i, emit);
                planned_events(s, i, emit);
                newcomer_events(s, i, emit);
                end_events(s, i, emit);
                move_events(s, i, emit);
            }
        }
        start_events(s, emit);
        for (int a = 0; a < kAttempts; ++a) {
            if (s.attempts[a].stage != kFree) attempt_events(s, a, emit);
        }
        fault_events(s, emit);
    }

    // All living members of the record in the table have entered it, and train.
    bool is_settled(const State& s) const;
    bool is_settled_in(const State& s, int table) const;
    // Too few live for a common record.
    bool is_excused(const State& s) const;

    // A hash of all that a state means to the rounds: which processes live in which record, and
    // which rounds each has applied.
    uint64_t outcome(const State& s) const;

    const Config c;
    // Events that were left out because no slot for a record was free: 0 in an exhaustive search.
    mutable uint64_t num_truncated = 0;

  private:
    template <typename Emit, typename Change>
    void step(const State& s, Event event, Emit&& emit, Change&& change) const {
        State n = s;
        const char* broken = nullptr;
        change(n, broken);
        normalise(n);
        emit(event, n, broken);
    }

    // ---------------------------------------------------------------- sets of processes

    Set up(const State& s) const {
        Set set = 0;
        for (int i = 0; i < kProcesses; ++i) set |= s.processes[i].is_up() ? bit(i) : 0;
        return set;
    }
    Set numbers(const State& s, Set set) const {
        Set found = 0;
        for (int i = 0; i < kProcesses; ++i) {
            if (has(set, i)) found |= bit(s.processes[i].number);
        }
        return found;
    }
    Set up_newcomers(const State& s) const {
        Set set = 0;
        for (int i = 0; i < kProcesses; ++i) set |= s.processes[i].is_newcomer() ? bit(i) : 0;
        return set;
    }
    // Living members of a record that have its state.
    Set up_with_state(const State& s, int record) const {
        Set set = 0;
        for (int i = 0; i < kProcesses; ++i) {
            const Process& p = s.processes[i];
            const bool is_in = p.is_up() && p.entered == record;
            set |= is_in && p.has_state() ? bit(i) : 0;
        }
        return set;
    }
    bool has_rounds(const State& s, int record) const {
        return s.records[record].number < c.rounds;
    }
    uint8_t table_of(const State& s, int i) const { return s.tables[s.processes[i].place()]; }
    bool is_in_table(const State& s, int r) const { return s.tables[0] == r || s.tables[1] == r; }
    bool can_reach(const State& s, int i, int j) const {
        const int low = c.members - 2, high = c.members - 1;
        return !(s.is_cut && ((i == low && j == high) || (i == high && j == low)));
    }
    // A table that forgot, and the table of another store, have another id.
    int id_of(const State& s, int place) const { return place == 0 ? c.forgets - s.forgets : 7; }
    bool is_other_table(const State& s, int place, int record) const {
        return s.records[record].table_id != id_of(s, place);
    }
    bool has_all_for_new_table(const State& s, const Attempt& attempt) const;
    int best_checkpoint(const State& s, Set set) const {
        int best = kNone;
        for (int i = 0; i < kProcesses; ++i) {
            const bool is_better =
                best == kNone || s.processes[i].checkpoint > s.processes[best].checkpoint;
            if (has(set, i) && is_better) best = i;
        }
        return best;
    }

    // On another table a planned change needs SEALED, too.
    bool seals_planned(const State& s, int i) const {
        return is_other_table(s, s.processes[i].place(), s.processes[i].entered) &&
               !c.is(Mutant::kPlannedUnsealed);
    }
    Attempt new_attempt(const State& s, Kind kind, int proposer, int base, Set members) const {
        Attempt attempt{};
        attempt.place = uint8_t(s.processes[proposer].place());
        attempt.table_id = uint8_t(id_of(s, attempt.place));
        attempt.stage = kCollecting;
        attempt.kind = kind;
        attempt.proposer = uint8_t(proposer);
        attempt.base = uint8_t(base);
        attempt.members = members;
        attempt.record = attempt.source = kNone;
        return attempt;
    }

    void normalise(State& n) const;
    void prune_attempts(State& n) const;
    void prune_records(State& n) const;
    void sort_attempts(State& n) const;
    void enter(State& n, int i, int record, const char*& broken) const;
    void end(State& n, int i) const;
    void seal(State& n, int i, int a) const;
    bool may_enter(const State& s, int i, int record) const;
    int free_attempt(const State& s) const;
    int free_record(const State& s, int number) const;
    void decide(const State& s, const Attempt& attempt, uint8_t& commits, uint8_t& decides) const;
    bool swap(State& n, int a, const char*& broken) const;
    void learn(State& n, int a, const char*& broken) const;
    void ask(State& n, int a, const char*& broken) const;
    bool may_ask(const State& s, int a) const;
    bool may_swap(const State& s, const Attempt& attempt) const;
    bool is_own_open(const State& s, int i) const;
    bool may_be_state(const State& s, Set members, int base) const;

    template <typename Emit>
    void round_events(const State& s, int i, Emit&& emit) const;
    template <typename Emit>
    void table_events(const State& s, int i, Emit&& emit) const;
    template <typename Emit>
    void proposal_events(const State& s, int i, Emit&& emit) const;
    template <typename Emit>
    void planned_events(const State& s, int i, Emit&& emit) const;
    template <typename Emit>
    void newcomer_events(const State& s, int i, Emit&& emit) const;
    template <typename Emit>
    void end_events(const State& s, int i, Emit&& emit) const;
    template <typename Emit>
    void move_events(const State& s, int i, Emit&& emit) const;
    template <typename Emit>
    void start_events(const State& s, Emit&& emit) const;
    template <typename Emit>
    void attempt_events(const State& s, int a, Emit&& emit) const;
    template <typename Emit>
    void receiver_events(const State& s, int a, int j, Emit&& emit) const;
    template <typename Emit>
    void fault_events(const State& s, Emit&& emit) const;
};

// ------------------------------------------------------------------------ rounds (rules 2, 3)

template <typename Emit>
void Rules::round_events(const State& s, int i, Emit&& emit) const {
    const Process& p = s.processes[i];
    const int r = p.entered;
    if (r == kNone || !has_rounds(s, r) || !p.has_state()) return;
    // Rule 2: a sealed process neither votes nor applies, except by a record.
    if (p.is_sealed() && !c.is(Mutant::kNoPromise)) return;
    for (int k = 0; k < c.streams; ++k) {
        if (!has(s.voted[r][k], i)) {
            step(s, {Act::kVotes, uint8_t(i), uint8_t(k)}, emit,
                 [&](State& n, const char*&) { n.voted[r][k] |= bit(i); });
            continue;
        }
        Set voted = s.voted[r][k];
        const int before = s.records[r].parent;
        if (c.is(Mutant::kOldVotes) && before != kNone) voted |= s.voted[before][k];
        bool hears_all = contains(voted, s.records[r].members);
        for (int j = 0; j < kProcesses; ++j) {
            if (has(s.records[r].members, j)) hears_all = hears_all && can_reach(s, i, j);
        }
        if (!hears_all || has(s.applied[r][k], i)) continue;
        step(s, {Act::kApplies, uint8_t(i), uint8_t(k)}, emit, [&](State& n, const char*& broken) {
            n.applied[r][k] |= bit(i);
            for (int q = 0; q < kRecords; ++q) {
                const Record& record = s.records[q];
                const bool counts = is_in_table(s, q) || record.entered_by != 0;
                if (record.kind != kNoRecord && record.parent == r && record.decides && counts &&
                    !has(record.commits, k)) {
                    broken = "I2: a void round is applied";
                }
            }
        });
    }
}

// ------------------------------------------------------- the table (rules 4, 6, 8, 13)

template <typename Emit>
void Rules::table_events(const State& s, int i, Emit&& emit) const {
    const Process& p = s.processes[i];
    const int r = p.entered, t = table_of(s, i);
    for (int q = 0; q < kRecords; ++q) {
        // OPEN, also of a record that the table no longer holds. A newcomer takes OPEN only as a
        // hint to read: by a late OPEN a newcomer would enter a record of long ago.
        const bool is_former = p.is_on_new_table() &&
                               s.records[q].table_id != id_of(s, p.place()) &&
                               !c.is(Mutant::kLateAnswer);
        const bool may_hear = (r != kNone && !is_former) || c.is(Mutant::kNewcomerHearsOpen);
        if (has(s.records[q].open_to, i) && may_hear && may_enter(s, i, q)) {
            step(s, {Act::kHearsOpen, uint8_t(i), uint8_t(q)}, emit,
                 [&](State& n, const char*& broken) { enter(n, i, q, broken); });
        }
    }
    for (int j = 0; j < kProcesses && t == kNone && r != kNone; ++j) {
        // The table is empty, and a place key says that process j is in a newer record: i asks j.
        const Process& q = s.processes[j];
        if (!q.is_up() || q.entered == kNone || s.records[q.entered].line != s.records[r].line)
            continue;
        if (s.records[q.entered].number <= s.records[r].number) continue;
        const bool is_member = has(s.records[q.entered].members, i);
        if (is_member && !may_enter(s, i, q.entered)) continue;
        step(s, {is_member ? Act::kReads : Act::kIsFenced, uint8_t(i), q.entered}, emit,
             [&](State& n, const char*& broken) {
                 if (is_member) {
                     enter(n, i, q.entered, broken);
                 } else {
                     end(n, i);
                 }
             });
    }
    if (t == kNone || t == r) return;
    const Record& record = s.records[t];
    if (has(record.members, i)) {
        if (may_enter(s, i, t)) {
            step(s, {Act::kReads, uint8_t(i), uint8_t(t)}, emit,
                 [&](State& n, const char*& broken) { enter(n, i, t, broken); });
        } else if (r != kNone && record.number > s.records[r].number) {
            step(s, {Act::kReads, uint8_t(i), uint8_t(t)}, emit, [&](State&, const char*& broken) {
                broken = "I5: a member missed a record in which it is";
            });
        }
    } else if (r != kNone &&
               (record.number > s.records[r].number || record.line != s.records[r].line)) {
        // Also by the record of another founding.
        step(s, {Act::kIsFenced, uint8_t(i), uint8_t(t)}, emit,
             [&](State& n, const char*&) { end(n, i); });
    }
}

// ------------------------------------------------------------ proposals (rules 1, 5, 10, 13)

template <typename Emit>
void Rules::proposal_events(const State& s, int i, Emit&& emit) const {
    const Process& p = s.processes[i];
    const int r = p.entered;
    if (c.demands > 0) {
        // Rule 10: the caller of change_group names a set.
        for (int d = 1; d < 1 << c.members; ++d) {
            const bool is_offered =
                d == (1 << c.members) - 1 || size(Set(d)) >= c.members - c.demands + 1;
            // The call begins with a look into the table.
            const int t = table_of(s, i);
            const bool is_gone = t == kNone && r != kNone;
            const bool is_newest =
                is_gone ||
                (t != kNone && (t == r || (r == kNone && !has(s.records[t].members, i))));
            if (is_offered && has(Set(d), p.number) && p.told != d && is_newest &&
                (r == kNone || s.records[r].number < c.last)) {
                step(s, {Act::kIsTold, uint8_t(i), 0, Set(d)}, emit,
                     [&](State& n, const char*&) { n.processes[i].told = Set(d); });
            }
        }
    }
    if (r == kNone) return;
    const Record& base = s.records[r];
    if (base.number >= c.last || (base.kind == kFinish && !c.is(Mutant::kAfterFinish))) return;
    // A proposal on a base that a durable table has left behind only seals its proposer.
    if (c.is_durable() && table_of(s, i) != r) return;
    if (c.proposals > 0 && s.proposals == 0) return;
    const int a = free_attempt(s);
    if (a < 0 || is_own_open(s, i)) return;
    if (c.demands > 0 && p.told == 0) return;
    const Set candidates = base.members | (c.demands > 0 ? up_newcomers(s) : 0);
    for (int set = 1; set < 1 << kProcesses; ++set) {
        const Set members = Set(set);
        if (!has(members, i) || !contains(candidates, members)) continue;
        if (c.demands > 0 && (numbers(s, members) != p.told || size(members) != size(p.told))) {
            continue;
        }
        if (!may_be_state(s, members, r)) continue;
        step(s, {Act::kProposes, uint8_t(i), uint8_t(r), members}, emit,
             [&](State& n, const char*&) {
                 if (c.proposals > 0) --n.proposals;
                 Attempt& attempt = n.attempts[a];
                 attempt = new_attempt(s, kUnplanned, i, r, members);
                 attempt.prepares = Set(members & ~bit(i));
                 // On a new table all members of the base must have sealed.
                 if (is_other_table(s, attempt.place, r)) {
                     attempt.prepares = Set((members | base.members) & ~bit(i) & up(s));
                 }
                 for (int j = 0; j < kProcesses && c.is(Mutant::kOldAttempt); ++j) {
                     const Process& q = s.processes[j];
                     if (q.entered != r || !q.is_sealed()) continue;
                     attempt.seals |= bit(j);
                     attempt.with_state |= q.has_state() ? bit(j) : 0;
                     for (int k = 0; k < c.streams; ++k) {
                         attempt.voted[k] |= s.voted[r][k] & bit(j);
                     }
                 }
                 seal(n, i, a);
             });
    }
}

// ---------------------------------------------------------------- planned changes (rules 9, 14)

template <typename Emit>
void Rules::planned_events(const State& s, int i, Emit&& emit) const {
    const Process& p = s.processes[i];
    const int r = p.entered;
    if (!(c.planned || c.joins || c.leaves > 0 || c.finish) || r == kNone) return;
    const Record& base = s.records[r];
    if (base.number >= c.last || base.kind == kFinish || !has_rounds(s, r) || p.is_sealed()) return;
    const bool swaps_now = !c.answers && !seals_planned(s, i);
    if (!p.has_state() || ((c.is_durable() || swaps_now) && table_of(s, i) != r)) return;
    const int a = free_attempt(s);
    if (a < 0 || is_own_open(s, i)) return;
    // The proposer holds all votes of all rounds that were sent before the boundary.
    uint8_t commits = 0;
    for (int k = 0; k < c.streams; ++k) commits |= has(s.applied[r][k], i) ? 1 << k : 0;
    const uint8_t all = uint8_t((1 << c.streams) - 1);
    if (c.is(Mutant::kPlannedFirstVotes)) {
        if (!has(commits, 0)) return;
        commits = all;
    } else if (c.is(Mutant::kPlannedRoundK)) {
        if (!has(commits, 0)) return;
    } else if (!c.is(Mutant::kPlannedOwnPosition) && commits != all) {
        return;
    }
    Set leavers = 0, ready = 0;
    for (int j = 0; j < kProcesses; ++j) {
        const Process& q = s.processes[j];
        if (has(base.members, j) && q.is_up() && q.is_leaving()) leavers |= bit(j);
        const bool follows = q.follows == r || c.is(Mutant::kStaleFollower);
        if (q.is_newcomer() && q.follows != kNone && follows) ready |= bit(j);
    }
    const auto plan = [&](Kind kind, Set members) {
        step(s, {Act::kPlans, uint8_t(i), uint8_t(kind), members}, emit,
             [&](State& n, const char*& broken) {
                 Attempt& attempt = n.attempts[a];
                 attempt = new_attempt(s, kind, i, r, members);
                 for (int k = 0; k < c.streams; ++k) {
                     attempt.voted[k] = has(commits, k) ? base.members : 0;
                 }
                 if (seals_planned(s, i)) {
                     attempt.prepares = Set(base.members & ~bit(i) & up(s));
                     seal(n, i, a);
                 } else {
                     ask(n, a, broken);
                 }
             });
    };
    for (int set = 0; set < 1 << kProcesses; ++set) {
        const Set joiners = Set(set);
        if (!contains(ready, joiners)) continue;
        const Set members = (base.members & ~leavers) | joiners;
        const bool is_new = c.planned || joiners != 0 || leavers != 0;
        const bool is_one_each = size(numbers(s, members)) == size(members);
        if (!is_one_each && !c.is(Mutant::kTwoOfOneNumber)) continue;
        if (seals_planned(s, i) && !has(members, i)) continue;
        if (is_new && members != 0) plan(kPlanned, members);
    }
    if (c.finish) plan(kFinish, base.members);
}

// ---------------------------------------------- newcomers (rules 9, 11, 12), copies of the state

template <typename Emit>
void Rules::newcomer_events(const State& s, int i, Emit&& emit) const {
    const Process& p = s.processes[i];
    if (p.entered != kNone && !p.has_state() && up_with_state(s, p.entered) != 0) {
        step(s, {Act::kCopies, uint8_t(i)}, emit,
             [&](State& n, const char*&) { n.processes[i].flags |= kHasState; });
    }
    if (!p.is_newcomer()) return;
    for (int r = 0; r < kRecords && table_of(s, i) == kNone; ++r) {
        // The table is empty: a newcomer asks a member for the record for which it was ready.
        const Record& record = s.records[r];
        const bool is_ready =
            p.follows == record.parent || (p.follows == kNone && record.kind != kPlanned);
        bool has_member = false;
        for (const Process& q : s.processes) has_member |= q.is_up() && q.entered == r;
        if (!has_member || !is_ready || !has(record.members, i)) continue;
        step(s, {Act::kHearsOpen, uint8_t(i), uint8_t(r)}, emit,
             [&](State& n, const char*& broken) { enter(n, i, r, broken); });
    }
    if (c.joins) {
        for (int r = 0; r < kRecords; ++r) {
            const Record& record = s.records[r];
            const bool is_free = !has(numbers(s, record.members), p.number);
            if (record.kind == kNoRecord || record.kind == kFinish || p.follows == r) continue;
            const int former = p.follows == kNone ? -1 : s.records[p.follows].number;
            if (!is_free || record.number < former || up_with_state(s, r) == 0) continue;
            step(s, {Act::kFollows, uint8_t(i), uint8_t(r)}, emit,
                 [&](State& n, const char*&) { n.processes[i].follows = uint8_t(r); });
        }
    }
    Set someone = 0;  // Living processes in a record.
    for (int j = 0; j < kProcesses; ++j) {
        if (s.processes[j].is_up() && s.processes[j].entered != kNone) someone |= bit(j);
    }
    const int t = table_of(s, i);
    const bool may_found =
        c.founding && t == kNone && (someone == 0 || c.is(Mutant::kFoundWithState));
    bool may_revive = false;
    if (c.revival && t != kNone) {
        const Record& record = s.records[t];
        const bool has_died = someone == 0 && (up(s) & record.members) == 0;
        const bool all_died = has_died || c.is(Mutant::kReviveLiving);
        const bool is_open = record.kind != kFinish || c.is(Mutant::kAfterFinish);
        may_revive = all_died && is_open && record.number < c.last;
    }
    const int a = free_attempt(s);
    if (a < 0 || is_own_open(s, i) || !(may_found || may_revive)) return;
    const Set newcomers = up_newcomers(s);
    for (int set = 1; set < 1 << kProcesses; ++set) {
        const Set members = Set(set);
        if (!contains(newcomers, members) || !has(members, i)) continue;
        if (size(numbers(s, members)) != size(members)) continue;
        const int source = best_checkpoint(s, members);
        if (may_found && size(members) < c.min_replicas) continue;
        if (may_revive && s.processes[source].checkpoint < s.records[t].step && !c.all_lost &&
            !c.is(Mutant::kReviveBehind)) {
            continue;
        }
        const Kind kind = may_found ? kFounding : kRevival;
        step(s, {may_found ? Act::kFounds : Act::kRevives, uint8_t(i), uint8_t(t), members}, emit,
             [&](State& n, const char*& broken) {
                 n.attempts[a] = new_attempt(s, kind, i, t, members);
                 ask(n, a, broken);
             });
    }
}

// ------------------------------------------------------------ leaving and the end (rules 14, 15)

template <typename Emit>
void Rules::end_events(const State& s, int i, Emit&& emit) const {
    const Process& p = s.processes[i];
    const int t = table_of(s, i);
    if (p.is_newcomer() && t != kNone && s.records[t].kind == kFinish) {
        step(s, {Act::kEnds, uint8_t(i)}, emit, [&](State& n, const char*&) { end(n, i); });
    }
    if (p.entered == kNone) return;
    if (s.leaves > 0 && !p.is_leaving() && s.records[p.entered].number < c.last) {
        step(s, {Act::kWantsToLeave, uint8_t(i)}, emit, [&](State& n, const char*&) {
            --n.leaves;
            n.processes[i].flags |= kLeaving;
        });
    }
    if (!p.is_leaving()) return;
    // Rule 15: without others a leaver ends; while newcomers wait, the last one with state stays.
    bool is_alone = true, is_last_with_state = p.has_state();
    for (int j = 0; j < kProcesses; ++j) {
        const Process& q = s.processes[j];
        if (!q.is_up() || j == i) continue;
        is_alone = is_alone && q.is_leaving();
        if (q.entered == p.entered && q.has_state()) is_last_with_state = false;
    }
    if (!is_alone && !c.is(Mutant::kLeaverLeavesAtOnce)) return;
    step(s, {Act::kEnds, uint8_t(i)}, emit, [&](State& n, const char*& broken) {
        if (is_last_with_state && up_newcomers(s) != 0) {
            broken = "I6: the last state leaves though newcomers wait";
        }
        end(n, i);
    });
}

template <typename Emit>
void Rules::move_events(const State& s, int i, Emit&& emit) const {
    // Rule 10: the caller names another store, which is as a table that has forgotten.
    if (!c.moves || s.processes[i].place() != 0) return;
    for (const Attempt& attempt : s.attempts) {
        // No caller leaves a store before the answers of that store.
        if (attempt.stage != kFree && attempt.proposer == i) return;
    }
    step(s, {Act::kMoves, uint8_t(i)}, emit,
         [&](State& n, const char*&) { n.processes[i].flags |= kMoved; });
}

template <typename Emit>
void Rules::start_events(const State& s, Emit&& emit) const {
    int slot = 0;
    while (slot < kProcesses && s.processes[slot].life != kAbsent) ++slot;
    if (slot >= c.members + c.newcomers) return;
    Set taken = 0;
    for (int j = 0; j < kProcesses; ++j) {
        if (s.processes[j].is_up()) taken |= bit(s.processes[j].number);
    }
    const bool restarts = slot >= c.members && c.restarts;
    for (int number = restarts ? 0 : slot; number < (restarts ? c.members : slot + 1); ++number) {
        if (has(taken, number) && !c.zombies) continue;
        for (int checkpoint = 0; checkpoint <= c.checkpoints; ++checkpoint) {
            step(s, {Act::kStarts, uint8_t(slot), uint8_t(number), Set(checkpoint)}, emit,
                 [&](State& n, const char*&) {
                     Process& p = n.processes[slot];
                     p = Process{};
                     p.life = kUp;
                     p.number = uint8_t(number);
                     p.entered = p.follows = kNone;
                     p.checkpoint = uint8_t(checkpoint);
                 });
        }
    }
}

// ------------------------------------------------------------- attempts (rules 1, 2, 4, 5, 6)

template <typename Emit>
void Rules::attempt_events(const State& s, int a, Emit&& emit) const {
    const Attempt& attempt = s.attempts[a];
    const int i = attempt.proposer;
    const Process& p = s.processes[i];
    for (int j = 0; j < kProcesses; ++j) {
        if (s.processes[j].is_up()) receiver_events(s, a, j, emit);
    }
    const bool is_in_base = p.is_up() && p.entered == attempt.base;
    if (may_ask(s, a)) {
        step(s, {Act::kAsks, uint8_t(i), attempt.base, attempt.members}, emit,
             [&](State& n, const char*& broken) { ask(n, a, broken); });
    }
    // Rule 5: a proposer may give an attempt up. A PREPARE that comes later is as one that is lost.
    if (is_in_base && attempt.stage == kCollecting && has(attempt.seals, i)) {
        step(s, {Act::kWithdraws, uint8_t(i), uint8_t(attempt.base), attempt.members}, emit,
             [&](State& n, const char*&) { n.attempts[a] = Attempt{}; });
    }
    if (attempt.stage == kRequested) {
        const bool matches = may_swap(s, attempt);
        step(s,
             {matches ? Act::kTableSwaps : Act::kTableRefuses, uint8_t(i), attempt.base,
              attempt.members},
             emit, [&](State& n, const char*& broken) {
                 if (!matches) {
                     n.attempts[a].stage = kRefused;
                 } else if (swap(n, a, broken)) {
                     n.attempts[a].stage = kDone;
                 }
             });
    }
    const bool is_newcomer = p.is_newcomer() && attempt.kind != kUnplanned;
    const bool may_learn = p.is_up() && (p.entered == attempt.base || is_newcomer);
    if (may_learn && (attempt.stage == kDone || attempt.stage == kRefused)) {
        step(s, {Act::kLearns, uint8_t(i), attempt.stage}, emit,
             [&](State& n, const char*& broken) { learn(n, a, broken); });
    }
}

template <typename Emit>
void Rules::receiver_events(const State& s, int a, int j, Emit&& emit) const {
    const Attempt& attempt = s.attempts[a];
    const Process& q = s.processes[j];
    const int i = attempt.proposer;
    int addressee = has(attempt.prepares, j) ? j : -1;
    if (c.is(Mutant::kNoNonce) && addressee < 0) {
        for (int k = 0; k < kProcesses; ++k) {
            const bool is_same = s.processes[k].life == kEnded && s.processes[k].number == q.number;
            if (has(attempt.prepares, k) && is_same) addressee = k;
        }
    }
    if (addressee >= 0) {
        // Rule 4: members that have entered the base answer, and newcomers that a demand names.
        const bool is_demanded =
            c.demands > 0 && q.entered == kNone && !has(s.records[attempt.base].members, j);
        const bool may_answer = q.entered == attempt.base || is_demanded ||
                                c.is(Mutant::kAnyRecordAnswers) || addressee != j;
        const bool is_here = q.place() == attempt.place;
        const bool agrees =
            c.demands == 0 || q.told == numbers(s, attempt.members) || c.is(Mutant::kOtherDemand);
        const bool is_repeated = c.repeats && has(attempt.seals, j);
        if (may_answer && agrees && is_here && !is_repeated) {
            step(s, {Act::kSeals, uint8_t(j), uint8_t(i), attempt.members}, emit,
                 [&](State& n, const char*&) {
                     if (!c.repeats) n.attempts[a].prepares &= Set(~bit(addressee));
                     seal(n, j, a);
                     if (addressee != j) {
                         n.attempts[a].seals |= bit(addressee);
                         for (Set& voted : n.attempts[a].voted) {
                             if (has(voted, j)) voted |= bit(addressee);
                         }
                     }
                 });
        } else if (q.entered != kNone && s.processes[i].is_up() &&
                   s.processes[i].entered == attempt.base &&
                   s.records[q.entered].line == s.records[attempt.base].line &&
                   s.records[q.entered].number > s.records[attempt.base].number) {
            // NO with the newer record: the proposer enters the record, or is fenced.
            step(s, {Act::kSaysNo, uint8_t(j), uint8_t(i), attempt.members}, emit,
                 [&](State& n, const char*& broken) {
                     n.attempts[a].prepares &= Set(~bit(addressee));
                     if (has(s.records[q.entered].members, i) && may_enter(s, i, q.entered)) {
                         enter(n, i, q.entered, broken);
                     } else {
                         end(n, i);
                     }
                 });
        } else if (!c.repeats) {
            // NO has no other effect than that the proposer need not wait.
            step(s, {Act::kSaysNo, uint8_t(j), uint8_t(i), attempt.members}, emit,
                 [&](State& n, const char*&) { n.attempts[a].prepares &= Set(~bit(addressee)); });
        }
    }
    if (c.ready && has(attempt.seals, j) && !has(attempt.readies, j)) {
        // READY: the process has heard every member of S on a link.
        bool hears_all = contains(attempt.seals, attempt.members);
        for (int k = 0; k < kProcesses; ++k) {
            if (has(attempt.members, k)) hears_all = hears_all && can_reach(s, j, k);
        }
        if (hears_all) {
            step(s, {Act::kIsReady, uint8_t(j), uint8_t(i), attempt.members}, emit,
                 [&](State& n, const char*&) { n.attempts[a].readies |= bit(j); });
        }
    }
}

// ------------------------------------------------------------------------------------- faults

template <typename Emit>
void Rules::fault_events(const State& s, Emit&& emit) const {
    if (s.crashes > 0) {
        for (int i = 0; i < kProcesses; ++i) {
            if (!s.processes[i].is_up()) continue;
            step(s, {Act::kDies, uint8_t(i)}, emit, [&](State& n, const char*&) {
                --n.crashes;
                end(n, i);
            });
        }
    }
    if (s.forgets > 0 && s.tables[0] != kNone) {
        step(s, {Act::kForgets}, emit, [&](State& n, const char*&) {
            --n.forgets;
            n.tables[0] = kNone;
            // Its connections break, and so no request from before is answered by a swap.
            for (Attempt& attempt : n.attempts) {
                const bool is_lost = attempt.stage == kRequested && attempt.place == 0;
                if (is_lost && !c.is(Mutant::kRequestsSurvive)) attempt.stage = kRefused;
            }
        });
    }
    if (c.cuts > 0 && !s.is_cut) {
        step(s, {Act::kIsCut}, emit, [&](State& n, const char*&) { n.is_cut = 1; });
    }
    if (s.losses == 0) return;
    const auto lose = [&](int i, int what, auto&& change) {
        step(s, {Act::kLoses, uint8_t(i), uint8_t(what)}, emit, [&](State& n, const char*&) {
            --n.losses;
            change(n);
        });
    };
    for (int j = 0; j < kProcesses; ++j) {
        for (int a = 0; a < kAttempts; ++a) {
            const Attempt& attempt = s.attempts[a];
            if (attempt.stage != kCollecting) continue;
            const Set mask = Set(~bit(j));
            if (has(attempt.prepares, j)) {
                lose(j, 0, [&](State& n) { n.attempts[a].prepares &= mask; });
            }
            if (has(attempt.seals, j) && j != attempt.proposer) {
                lose(j, 1, [&](State& n) { n.attempts[a].seals &= mask; });
            }
            if (has(attempt.readies, j) && j != attempt.proposer) {
                lose(j, 2, [&](State& n) { n.attempts[a].readies &= mask; });
            }
        }
        for (int r = 0; r < kRecords; ++r) {
            if (has(s.records[r].open_to, j)) {
                lose(j, 3, [&](State& n) { n.records[r].open_to &= Set(~bit(j)); });
            }
        }
    }
}

}  // namespace agreement
