// The effect of the agreement's events on a state; rules.h says when each may happen.
#include "rules.h"

#include <algorithm>

namespace agreement {

State Rules::start() const {
    State s;
    std::memset(&s, 0, sizeof s);
    s.crashes = uint8_t(c.crashes);
    s.forgets = uint8_t(c.forgets);
    s.losses = uint8_t(c.losses);
    s.is_cut = c.cuts > 1;
    s.leaves = uint8_t(c.leaves);
    s.proposals = uint8_t(c.proposals);
    s.tables = {kNone, kNone};
    for (Record& record : s.records) record.parent = record.source = kNone;
    if (!c.founding) {
        s.tables[0] = 0;
        Record& first = s.records[0];
        first.kind = kFirst;
        for (int i = 0; i < c.members; ++i) {
            first.members |= bit(i);
            Process& p = s.processes[i];
            p.life = kUp;
            p.number = uint8_t(i);
            p.entered = 0;
            p.follows = kNone;
            p.flags = kHasState;
        }
        first.entered_by = first.members;
    }
    normalise(s);
    return s;
}

// Whether a process may enter a record in which it is a member.
bool Rules::may_enter(const State& s, int i, int record) const {
    const Process& p = s.processes[i];
    const Record& next = s.records[record];
    if (p.entered != kNone) return next.parent == p.entered;
    if (next.parent != kNone && next.kind != kRevival) {
        // Before a member of the base knows of the record, the table may forget, and the base may
        // go on in another table.
        const Set base = s.records[next.parent].members;
        const bool is_known = (next.entered_by & base) != 0 || has(next.open_to, i);
        if (!is_known && (base & up(s)) != 0 && !c.is(Mutant::kNewcomerFirst)) return false;
    }
    // A newcomer of a planned change has followed the rounds of the record before.
    return next.kind != kPlanned || p.follows == next.parent || c.is(Mutant::kStaleFollower);
}

// Rule 13: a swap into an empty table of another id needs the SEALED of every member of the base.
bool Rules::has_all_for_new_table(const State& s, const Attempt& attempt) const {
    const Set base = s.records[attempt.base].members;
    Set needed = base;
    if (c.is(Mutant::kNewTableLiving)) needed &= up(s);
    // The callers of change_group vouch that the others are dead.
    if (c.demands > 0) needed &= Set(attempt.members | up(s));
    if (c.is(Mutant::kNewTableMajority)) return 2 * size(attempt.seals & base) > size(base);
    return contains(attempt.seals, needed);
}

// Whether the table makes the swap of an attempt: the request names the bytes of the base.
bool Rules::may_swap(const State& s, const Attempt& attempt) const {
    const int table = s.tables[attempt.place];
    if (c.is(Mutant::kBlindSwap)) return true;
    const bool is_lost = attempt.table_id != id_of(s, attempt.place);
    if (is_lost && !c.is(Mutant::kRequestsSurvive)) return false;
    const bool is_founding = attempt.kind == kFounding || attempt.kind == kRevival;
    if (!is_founding && is_other_table(s, attempt.place, attempt.base)) return table == kNone;
    return table == attempt.base;
}

int Rules::free_attempt(const State& s) const {
    for (int a = 0; a < c.attempts; ++a) {
        if (s.attempts[a].stage == kFree) return a;
    }
    return -1;
}

int Rules::free_record(const State& s, int number) const {
    // On a durable table no two records have one number.
    if (c.is_durable()) return number < kRecords ? number : -1;
    for (int r = 0; r < kRecords; ++r) {
        if (s.records[r].kind == kNoRecord) return r;
    }
    return -1;
}

bool Rules::is_own_open(const State& s, int i) const {
    for (const Attempt& attempt : s.attempts) {
        const bool is_own = attempt.stage == kCollecting && attempt.proposer == i;
        const int entered = s.processes[i].entered;
        if (is_own && (entered == attempt.base || entered == kNone)) return true;
    }
    return false;
}

// A set without state is a group only where no member of the base lives that has state.
bool Rules::may_be_state(const State& s, Set members, int base) const {
    // Also a member that has not entered yet, such as the source of a founding.
    const Record& record = s.records[base];
    Set holders = 0;
    for (int i = 0; i < kProcesses; ++i) {
        const Process& p = s.processes[i];
        const bool holds =
            p.is_up() && (p.has_state() || (i == record.source && p.entered != base));
        if (holds && has(record.members, i)) holders |= bit(i);
    }
    return holders == 0 || (holders & members) != 0 || c.is(Mutant::kStatelessProposes);
}

// Rule 2: process i answers SEALED to attempt a, and promises to be still.
void Rules::seal(State& n, int i, int a) const {
    Attempt& attempt = n.attempts[a];
    Process& p = n.processes[i];
    attempt.seals |= bit(i);
    if (c.demands > 0 && p.told != numbers(n, attempt.members)) attempt.unnamed |= bit(i);
    for (Attempt& own : n.attempts) {
        // Whoever seals for a new table no longer hears of a swap in the former one.
        const bool is_former = own.stage != kFree && own.proposer == i && &own != &attempt;
        if (is_former && own.table_id != attempt.table_id && !c.is(Mutant::kLateAnswer)) {
            own = Attempt{};
        }
    }
    const bool is_new_table =
        attempt.base != kNone && n.records[attempt.base].table_id != attempt.table_id;
    if (is_new_table) p.flags |= kOnNewTable;
    if (p.entered == kNone) return;
    p.flags |= kSealed;
    if (p.has_state()) attempt.with_state |= bit(i);
    for (int k = 0; k < c.streams; ++k) {
        const auto& told = c.is(Mutant::kAppliedOnly) ? n.applied : n.voted;
        if (has(told[p.entered][k], i)) attempt.voted[k] |= bit(i);
    }
}

// Rule 3: a function of the SEALEDs of S and the base alone.
void Rules::decide(const State& s, const Attempt& attempt, uint8_t& commits,
                   uint8_t& decides) const {
    commits = decides = 0;
    if (attempt.base == kNone || !has_rounds(s, attempt.base)) return;
    const Set base = s.records[attempt.base].members;
    // A planned change has the votes of all members of the base.
    const bool has_all_votes = attempt.kind == kPlanned || attempt.kind == kFinish;
    Set voters = has_all_votes ? base : attempt.members & base;
    if (c.is(Mutant::kNewcomerVotes)) voters = attempt.members;
    decides = voters != 0 || c.is(Mutant::kEmptyDecides);
    for (int k = 0; k < c.streams && voters != 0; ++k) {
        const bool commit = c.is(Mutant::kAppliedOnly) ? (attempt.voted[k] & voters) != 0
                                                       : contains(attempt.voted[k], voters);
        if (commit) commits |= uint8_t(1 << k);
    }
    const uint8_t all = uint8_t((1 << c.streams) - 1);
    if (c.is(Mutant::kOneMeet) && attempt.kind == kUnplanned && commits != all) commits = 0;
}

// The table makes the swap of attempt a; false where no slot for a record is free.
bool Rules::swap(State& n, int a, const char*& broken) const {
    Attempt& attempt = n.attempts[a];
    const int number = attempt.base == kNone ? 0 : n.records[attempt.base].number + 1;
    const int slot = free_record(n, number);
    if (slot < 0) {
        ++num_truncated;
        return false;
    }
    Record record{};
    record.kind = attempt.kind;
    record.number = uint8_t(number);
    record.parent = attempt.base;
    record.table_id = attempt.table_id;
    record.line = attempt.base == kNone ? uint8_t(slot + 1) : n.records[attempt.base].line;
    record.members = attempt.members;
    decide(n, attempt, record.commits, record.decides);
    record.source = attempt.source;
    if (record.source != kNone) {
        // The state comes from a checkpoint.
        record.step = attempt.step;
        bool is_replaced = false;
        for (int i = 0; i < kProcesses; ++i) {
            const Process& p = n.processes[i];
            const bool holds = p.is_up() && p.entered != kNone && p.has_state();
            const bool is_of_base =
                attempt.base == kNone || has(n.records[attempt.base].members, i);
            if (holds && is_of_base) is_replaced = true;
        }
        if (is_replaced) broken = "I6: state that somebody living holds is replaced";
        if (attempt.kind == kRevival && record.step < n.records[attempt.base].step && !c.all_lost) {
            broken = "I6: the run goes back though nobody allowed a rollback";
        }
    } else {
        record.step = uint8_t(n.records[attempt.base].step + 1);
    }
    if (attempt.base != kNone) {
        const Record& base = n.records[attempt.base];
        if (base.kind == kFinish) broken = "I7: a record follows the finished one";
        for (int k = 0; k < c.streams; ++k) {
            if (record.decides && !has(record.commits, k) && n.applied[attempt.base][k] != 0) {
                broken = "I1: an applied round is decided void";
            }
        }
        if (attempt.kind == kUnplanned &&
            !contains(base.entered_by, Set(attempt.seals & base.members))) {
            broken = "I5: a process that has not entered the base is counted";
        }
    }
    if (attempt.kind == kUnplanned && (attempt.unnamed & attempt.members) != 0) {
        broken = "I9: a process is in a group that its caller did not name";
    }
    if (c.ready && attempt.kind == kUnplanned) {
        for (int i = 0; i < kProcesses; ++i) {
            for (int j = 0; j < i; ++j) {
                const Set pair = bit(i) | bit(j);
                const bool has_way = can_reach(n, i, j) || contains(attempt.readies, pair);
                if (contains(attempt.members, pair) && !has_way) {
                    broken = "I8: two members of a group have no way to each other";
                }
            }
        }
    }
    if (size(numbers(n, attempt.members)) != size(attempt.members)) {
        broken = "I5: two processes of one number are in a group";
    }
    n.records[slot] = record;
    n.voted[slot] = n.applied[slot] = {};
    n.tables[attempt.place] = attempt.record = uint8_t(slot);
    return true;
}

bool Rules::may_ask(const State& s, int a) const {
    const Attempt& attempt = s.attempts[a];
    const Process& p = s.processes[attempt.proposer];
    if (attempt.stage != kCollecting) return false;
    if (!p.is_up() || p.entered != attempt.base || !has(attempt.seals, attempt.proposer))
        return false;
    // A newcomer of a planned change has been ready before.
    const Set base = s.records[attempt.base].members;
    const Set asked = attempt.kind == kUnplanned ? attempt.members : Set(attempt.members & base);
    const int missing = size(Set(asked & ~attempt.seals));
    const bool is_sealed = missing == 0 || (missing == 1 && c.is(Mutant::kOpenWithoutOne) &&
                                            size(attempt.members) > 1);
    const bool is_ready =
        !c.ready || contains(attempt.readies, attempt.members) || c.is(Mutant::kNoReady);
    if (!is_sealed || !is_ready) return false;
    if (is_other_table(s, attempt.place, attempt.base) &&
        !(attempt.kind == kPlanned && c.is(Mutant::kPlannedUnsealed)) &&
        !has_all_for_new_table(s, attempt)) {
        return false;
    }
    if (c.answers || c.is(Mutant::kBlindSwap)) return true;
    // A swap that the table refuses at once changes nothing; see kWithdraws.
    return may_swap(s, attempt);
}

// The proposer writes its record, and asks the table to swap.
void Rules::ask(State& n, int a, const char*& broken) const {
    Attempt& attempt = n.attempts[a];
    attempt.stage = kRequested;
    bool has_state = attempt.kind == kPlanned || attempt.kind == kFinish;
    for (int i = 0; i < kProcesses && !has_state; ++i) {
        // A SEALED says whether its process has state.
        has_state = has(attempt.members, i) && has(attempt.with_state, i);
    }
    if (!has_state) {
        attempt.source = uint8_t(best_checkpoint(n, attempt.members));
        attempt.step = n.processes[attempt.source].checkpoint;
    }
    if (c.answers) return;
    attempt.stage = swap(n, a, broken) ? kDone : kRefused;
    if (broken == nullptr) learn(n, a, broken);
}

// The proposer learns the outcome of its swap: by the answer, or by reading the table.
void Rules::learn(State& n, int a, const char*& broken) const {
    Attempt& attempt = n.attempts[a];
    const int i = attempt.proposer;
    if (attempt.stage == kRefused) {
        // A founder looks again whether founding is still allowed.
        const bool may_ask_again = attempt.seals != 0;
        attempt.stage = may_ask_again ? kCollecting : kFree;
        return;
    }
    if (c.answers && n.processes[i].entered == kNone) {
        // A newcomer enters by reading alone.
        attempt.stage = kFree;
        return;
    }
    Record& record = n.records[attempt.record];
    record.open_to = Set(record.members & ~bit(i));
    if (has(record.members, i)) {
        enter(n, i, attempt.record, broken);
    } else {
        end(n, i);
    }
}

void Rules::enter(State& n, int i, int r, const char*& broken) const {
    Process& p = n.processes[i];
    Record& record = n.records[r];
    const int base = p.entered;
    if (base != kNone && base == record.parent && record.decides) {
        for (int k = 0; k < c.streams; ++k) {
            if (has(record.commits, k) && !has(n.voted[base][k], i)) {
                broken = "I3: a process must apply a round that it does not hold";
            }
            if (!has(record.commits, k) && n.applied[base][k] != 0) {
                broken = "I1: an applied round is void";
            }
        }
    }
    for (int q = 0; q < kRecords; ++q) {
        const Record& other = n.records[q];
        // A table that forgot a record all of whose members died cannot know of that record.
        const bool may_fork = !c.is_durable() && (record.source != kNone || c.demands > 0);
        const Set entered_by = may_fork ? Set(other.entered_by & up(n)) : other.entered_by;
        if (q == r || other.kind == kNoRecord || entered_by == 0) continue;
        if (other.number == record.number && other.parent == record.parent) {
            broken = "I4: two records that follow one record are entered";
        }
    }
    if (record.source != kNone) {
        p.flags = Set((p.flags & ~kHasState) | (i == record.source ? kHasState : 0));
    } else if (base == kNone) {
        const bool follows = p.follows == record.parent;
        if (record.kind != kUnplanned && !follows) {
            broken = "I3: a newcomer enters without the state of its base";
        }
        if (record.kind != kUnplanned) p.flags |= kHasState;
    }
    p.flags &= Set(~(kSealed | kOnNewTable));
    for (Attempt& attempt : n.attempts) {
        const bool is_over = attempt.stage != kRequested && attempt.stage != kFree;
        if (is_over && attempt.proposer == i) attempt = Attempt{};
    }
    p.entered = uint8_t(r);
    p.follows = kNone;
    // The set of an earlier call may win; the later call goes on from there.
    if (p.told == numbers(n, record.members)) p.told = 0;
    p.checkpoint = 0;
    record.entered_by |= bit(i);
    record.open_to &= Set(~bit(i));
}

void Rules::end(State& n, int i) const { n.processes[i].life = kEnded; }

// Forgets all that can make no difference any more, so that fewer states are told apart.
void Rules::normalise(State& n) const {
    if (!c.prunes) return;
    for (Process& p : n.processes) {
        if (p.life != kEnded) continue;
        const uint8_t number = p.number;
        p = Process{};
        p.life = kEnded;
        p.number = number;
        p.entered = p.follows = kNone;
    }
    prune_attempts(n);
    prune_records(n);
    sort_attempts(n);
}

// Attempts that can no longer become a record. PREPARE that come later are as those that are lost.
void Rules::prune_attempts(State& n) const {
    const Set living = up(n);
    for (Attempt& attempt : n.attempts) {
        if (attempt.stage == kFree) continue;
        const Process& p = n.processes[attempt.proposer];
        if (!c.is(Mutant::kNoNonce)) attempt.prepares &= living;
        const bool is_in_base = p.is_up() && (p.entered == attempt.base ||
                                              (p.entered == kNone && attempt.kind != kUnplanned));
        const bool is_over = attempt.stage != kRequested && !is_in_base;
        // A durable table never goes back, so a swap on another base can only be refused.
        const bool is_refused =
            c.is_durable() && attempt.base != n.tables[0] &&
            !(attempt.stage == kDone && attempt.record == n.tables[0] && is_in_base);
        if (is_over || is_refused) attempt = Attempt{};
    }
}

// Records that nobody is in, follows or may still enter, with the votes in them.
void Rules::prune_records(State& n) const {
    const Set living = up(n);
    const bool is_durable = c.is_durable();
    Set inhabited = 0;  // Records that a living process has entered.
    Set followed = 0;
    for (Process& p : n.processes) {
        if (!p.is_up()) continue;
        if (p.entered != kNone) inhabited |= bit(p.entered);
        const int i = int(&p - n.processes.data());
        bool waits = false;  // The process is a member of a record, and has not entered.
        for (int q = 0; q < kRecords; ++q) {
            const Record& record = n.records[q];
            const bool may_enter =
                (is_in_table(n, q) && has(record.members, i)) || has(record.open_to, i);
            waits = waits || (may_enter && record.parent == p.follows);
        }
        if (is_durable && p.follows != n.tables[0] && !waits && !c.is(Mutant::kStaleFollower)) {
            p.follows = kNone;
        }
        if (p.follows != kNone) followed |= bit(p.follows);
    }
    for (int r = 0; r < kRecords; ++r) {
        Record& record = n.records[r];
        record.open_to &= living;
        const bool may_be_entered = is_in_table(n, r) || record.open_to != 0;
        if (!has(inhabited, r) && !may_be_entered && !c.is(Mutant::kOldVotes)) {
            n.voted[r] = n.applied[r] = {};
        }
        if (!is_durable) continue;
        if (r != n.tables[0]) record.entered_by = 0;
        // The decision about the rounds of a record counts as long as somebody is in that record.
        const bool is_decision = record.parent != kNone && (has(inhabited, record.parent) ||
                                                            n.records[record.parent].open_to != 0);
        const bool is_used = r == n.tables[0] || has(inhabited, r) || has(followed, r) ||
                             is_decision || record.open_to != 0;
        if (!is_used && !c.is(Mutant::kOldVotes)) {
            record = Record{};
            record.parent = record.source = kNone;
            n.voted[r] = n.applied[r] = {};
        }
    }
}

// The order of the attempts means nothing.
void Rules::sort_attempts(State& n) const {
    for (int a = 1; a < kAttempts; ++a) {
        for (int b = a; b > 0; --b) {
            Attempt &left = n.attempts[b - 1], &right = n.attempts[b];
            if (std::memcmp(&left, &right, sizeof left) >= 0) break;
            std::swap(left, right);
        }
    }
}

uint64_t Rules::outcome(const State& s) const {
    State n;
    std::memset(&n, 0, sizeof n);
    n.crashes = s.crashes;
    n.forgets = s.forgets;
    const auto number_of = [&](int r) { return uint8_t(r == kNone ? kNone : s.records[r].number); };
    n.tables = {number_of(s.tables[0]), number_of(s.tables[1])};
    for (int i = 0; i < kProcesses; ++i) {
        const Process& p = s.processes[i];
        n.processes[i].life = p.life;
        n.processes[i].number = p.number;
        if (!p.is_up()) continue;
        n.processes[i].flags = p.flags & (kHasState | kLeaving | kMoved);
        n.processes[i].entered = number_of(p.entered);
        if (p.entered == kNone) continue;
        // By the number of a record: members, decision, votes and applied rounds.
        const int number = number_of(p.entered);
        n.records[number].members = s.records[p.entered].members;
        n.records[number].commits = s.records[p.entered].commits;
        n.voted[number] = s.voted[p.entered];
        n.applied[number] = s.applied[p.entered];
    }
    return hash_of(n);
}

bool Rules::is_settled(const State& s) const {
    // Members that train do not notice an empty table.
    for (int r = 0; r < kRecords; ++r) {
        const bool is_last = s.records[r].kind != kNoRecord && s.records[r].number == c.last;
        const bool is_known = is_in_table(s, r) || is_last || s.tables[0] == kNone;
        if (s.records[r].kind != kNoRecord && is_known && is_settled_in(s, r)) return true;
    }
    return false;
}

bool Rules::is_settled_in(const State& s, int table) const {
    if (table == kNone) return false;
    const Record& record = s.records[table];
    bool is_inhabited = false;
    for (int i = 0; i < kProcesses; ++i) {
        const Process& p = s.processes[i];
        if (!p.is_up()) continue;
        if (p.is_sealed()) return false;
        if (!has(record.members, i)) continue;
        if (p.entered != table) return false;
        is_inhabited = true;
    }
    return is_inhabited && (up_with_state(s, table) != 0 || record.number == c.last);
}

bool Rules::is_excused(const State& s) const {
    const Set living = up(s);
    int newest = s.tables[0];
    Set entered = 0;
    for (int i = 0; i < kProcesses; ++i) {
        const Process& p = s.processes[i];
        if (!p.is_up() || p.entered == kNone) continue;
        entered |= bit(i);
        const bool is_newer =
            newest == kNone || s.records[p.entered].number > s.records[newest].number;
        if (!c.is_durable() && is_newer) newest = p.entered;
    }
    if (newest == kNone) {
        // Nobody has state, and too few newcomers are there.
        return entered == 0 && (!c.founding || size(numbers(s, up_newcomers(s))) < c.min_replicas);
    }
    const Record& record = s.records[newest];
    const Set members = record.members & living;
    if (!c.is_durable()) {
        const bool is_there = record.table_id == id_of(s, 0) || (c.moves && record.table_id == 7);
        bool has_moved = false;
        for (const Process& p : s.processes) has_moved |= p.is_up() && p.place() != 0;
        const bool is_left = has_moved && record.table_id != 7;
        if (is_there && is_in_table(s, newest) && !is_left) return members == 0;
        // The table is gone: all members must seal.
        return members != record.members;
    }
    if (members != 0) return false;
    if (!c.revival || record.kind == kFinish || record.number >= c.last) return true;
    const int source = best_checkpoint(s, up_newcomers(s));
    return source == kNone || (s.processes[source].checkpoint < record.step && !c.all_lost);
}

const char* name_of(Act act) {
    static const char* const names[] = {
        "starts",    "votes",   "applies",  "reads",          "is-fenced", "hears-open", "proposes",
        "seals",     "says-no", "is-ready", "asks",           "swaps",     "refuses",    "learns",
        "withdraws", "plans",   "follows",  "copies",         "is-told",   "founds",     "revives",
        "ends",      "moves",   "dies",     "wants-to-leave", "forgets",   "loses",      "is-cut",
    };
    static_assert(sizeof names / sizeof names[0] == kActs);
    return names[int(act)];
}

namespace {

std::string set_text(Set set) {
    std::string text;
    for (int i = 0; i < 8; ++i) {
        if (has(set, i)) text += (text.empty() ? "" : ",") + std::to_string(i);
    }
    return "{" + text + "}";
}

}  // namespace

std::string sentence(const Event& event) {
    const std::string i = std::to_string(event.i), x = std::to_string(event.x);
    const std::string record = event.x == kNone ? "no record" : "record " + x;
    const std::string process = "process " + i, set = set_text(event.set);
    switch (event.act) {
        case Act::kStarts:
            return process + " starts with number " + x + " and a checkpoint at step " +
                   std::to_string(event.set);
        case Act::kVotes:
            return process + " votes in stream " + x;
        case Act::kApplies:
            return process + " hears all votes of stream " + x + " and applies";
        case Act::kReads:
            return process + " reads record " + x + " and enters";
        case Act::kIsFenced:
            return process + " reads record " + x + " and is fenced";
        case Act::kHearsOpen:
            return process + " hears OPEN of record " + x + " and enters";
        case Act::kProposes:
            return process + " seals, PREPARE " + set + " on record " + x;
        case Act::kSeals:
            return process + " answers SEALED to " + x + " for " + set;
        case Act::kSaysNo:
            return process + " answers NO to " + x + " for " + set;
        case Act::kIsReady:
            return process + " answers READY to " + x + " for " + set;
        case Act::kAsks:
            return process + " swaps " + record + " for " + set;
        case Act::kTableSwaps:
            return "the table swaps " + record + " for " + set + " of " + i;
        case Act::kTableRefuses:
            return "the table refuses the swap of " + i + " for " + set;
        case Act::kLearns:
            return process + " learns the outcome of its swap";
        case Act::kWithdraws:
            return process + " withdraws " + set;
        case Act::kPlans:
            return process + " swaps for a planned change to " + set;
        case Act::kFollows:
            return process + " follows record " + x + " and is ready";
        case Act::kCopies:
            return process + " copies the state of a member";
        case Act::kIsTold:
            return process + " is told change_group " + set;
        case Act::kFounds:
            return process + " founds " + set;
        case Act::kRevives:
            return process + " swaps over record " + x + " of the dead for " + set;
        case Act::kEnds:
            return process + " ends";
        case Act::kMoves:
            return process + " is told of another store";
        case Act::kDies:
            return process + " dies";
        case Act::kWantsToLeave:
            return process + " wants to leave";
        case Act::kForgets:
            return "the table forgets";
        case Act::kLoses:
            return "a message of or to " + i + " is lost (kind " + x + ")";
        case Act::kIsCut:
            return "the way between the last two members is cut";
    }
    return "";
}

}  // namespace agreement
