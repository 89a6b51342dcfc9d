// The state of a group in the explorer of the agreement: processes, attempts, records, the table.
//
// A process is (number, nonce): each slot of State::processes is one process, and a process that
// starts again with an old number takes a slot of its own. Sets of processes and of attempts are
// bits of one byte.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

namespace agreement {

constexpr int kProcesses = 6;
constexpr int kAttempts = 3;
constexpr int kRecords = 6;
constexpr int kStreams = 2;
constexpr uint8_t kNone = 15;

using Set = uint8_t;

constexpr Set bit(int i) { return static_cast<Set>(1u << i); }
constexpr bool has(Set set, int i) { return (set >> i & 1) != 0; }
constexpr bool contains(Set set, Set part) { return (part & ~set) == 0; }
inline int size(Set set) { return __builtin_popcount(set); }
inline int lowest(Set set) { return set == 0 ? kProcesses : __builtin_ctz(set); }

// Changes that break a rule on purpose, to see that an invariant notices.
enum class Mutant : uint8_t {
    kNothing,
    kNoPromise,           // a sealed process votes and applies on
    kAppliedOnly,         // a round commits iff somebody has applied the round
    kOpenWithoutOne,      // the proposer swaps though one SEALED lacks
    kBlindSwap,           // the table compares nothing
    kNoNonce,             // PREPARE reaches whoever has the number
    kPlannedOwnPosition,  // a planned change commits what its proposer has applied
    kPlannedRoundK,  // a planned change counts the round that asked for the change, others as above
    kPlannedFirstVotes,   // a planned change looks at the first stream alone, and commits all
    kOneMeet,             // all streams commit together, or none does
    kFoundWithState,      // newcomers found though somebody has state
    kStaleFollower,       // a newcomer's READY of an older record counts
    kNewcomerVotes,       // the SEALED of a newcomer counts as "has not voted"
    kEmptyDecides,        // an empty intersection of S and the base makes all rounds void
    kNoReady,             // the proposer does not wait for READY
    kLeaverLeavesAtOnce,  // a leaver with the only state does not wait for newcomers
    kReviveLiving,        // newcomers swap over a record though a member lives
    kReviveBehind,        // newcomers swap over a record with an older checkpoint
    kAfterFinish,         // a record after a finished one
    kStatelessProposes,   // members without state leave out the living one that has state
    kOtherDemand,         // a process answers a PREPARE of a set that its caller did not name
    kAnyRecordAnswers,    // a process that has not entered the base answers
    kOldAttempt,          // SEALED of an attempt for the former table counts for the new one
    kOldVotes,            // votes of the record before count, too
    kNewcomerHearsOpen,   // a newcomer enters by OPEN
    kRequestsSurvive,     // a table that forgets still makes swaps that were asked for before
    kTwoOfOneNumber,      // a planned change takes two newcomers of one number
    kNewTableMajority,    // a majority of SEALED is enough for an empty table of another id
    kNewTableLiving,      // SEALED of all that live is enough there
    kNewcomerFirst,       // a newcomer enters before a member of the base knows
    kLateAnswer,          // a process that sealed for another table learns of its old swap
    kPlannedUnsealed,     // a planned change is swapped into another table without SEALED
};

// Bounds and features; a feature with bound 0 is off.
struct Config {
    int members = 2;
    int newcomers = 0;  // further processes that may start: joiners, or restarts of a number
    int attempts = 2;   // unfinished attempts at a time
    int proposals = 0;  // attempts in all; 0 for any number
    int last = 2;       // the highest number of a record
    int rounds = 1;     // records 0 to rounds - 1 have one round a stream under way
    int streams = 1;
    int crashes = 0;
    int forgets = 0;
    int losses = 0;
    int leaves = 0;
    int demands = 0;      // change_group names sets of at least members - demands + 1 numbers
    int cuts = 0;         // 1: the way between the last two members may go, 2: there is none
    int checkpoints = 0;  // the highest inner step of a newcomer's checkpoint
    int min_replicas = 2;
    bool restarts = false;  // newcomers have numbers of members
    bool founding = false;  // at first there is no record
    bool revival = false;   // rule 12: all died
    bool joins = false;     // newcomers follow and become members
    bool planned = false;
    bool finish = false;
    bool moves = false;     // the callers name another store, one after another
    bool answers = false;   // the request of a swap and its answer travel
    bool repeats = false;   // a relay repeats messages
    bool zombies = false;   // a number starts again while its old process lives
    bool ready = false;     // READY apart from SEALED
    bool all_lost = false;  // no checkpoint at the record's inner step: roll back
    bool prunes = true;  // forgets what can make no difference, so that fewer states are told apart
    Mutant mutant = Mutant::kNothing;

    bool is(Mutant m) const { return mutant == m; }
    bool is_durable() const { return forgets == 0 && !moves && !is(Mutant::kBlindSwap); }
};

enum Life : uint8_t { kAbsent, kUp, kEnded };

enum Flag : uint8_t {
    kSealed = 1,
    kHasState = 2,
    kLeaving = 4,
    kOnNewTable = 8,  // has sealed for the record of another table than the base's
    kMoved = 16,      // uses the table of another store
};

struct Process {
    uint8_t life;
    uint8_t number;
    uint8_t entered;  // a record, kNone for a newcomer
    uint8_t follows;  // the record whose rounds a newcomer follows; kNone
    uint8_t flags;
    Set told;            // the numbers that its caller named in change_group
    uint8_t checkpoint;  // inner step of a newcomer's checkpoint

    bool is_up() const { return life == kUp; }
    bool is_sealed() const { return (flags & kSealed) != 0; }
    bool has_state() const { return (flags & kHasState) != 0; }
    bool is_on_new_table() const { return (flags & kOnNewTable) != 0; }
    int place() const { return (flags & kMoved) != 0 ? 1 : 0; }
    bool is_leaving() const { return (flags & kLeaving) != 0; }
    bool is_newcomer() const { return life == kUp && entered == kNone; }
};

enum Stage : uint8_t {
    kFree,
    kCollecting,
    kRequested,  // the request of the swap is on its way
    kDone,       // swapped; the proposer has not learnt of it
    kRefused,    // refused; the proposer has not learnt of it
};

enum Kind : uint8_t { kNoRecord, kFirst, kUnplanned, kPlanned, kFinish, kFounding, kRevival };

struct Attempt {
    uint8_t stage;
    uint8_t kind;
    uint8_t proposer;
    uint8_t place;                    // which table
    uint8_t table_id;                 // the table to which the request goes
    uint8_t base;                     // a record; kNone for a founding
    Set members;                      // S
    Set prepares;                     // PREPARE under way to them
    Set seals;                        // their SEALED was sent
    Set readies;                      // their READY was sent
    std::array<Set, kStreams> voted;  // whose SEALED says "voted"
    Set unnamed;                      // sealed, though their callers did not name S
    Set with_state;                   // members whose SEALED says "has state"
    uint8_t source, step;  // whose checkpoint is the state, written when the swap is asked for
    uint8_t record;        // the record that the attempt became, or kNone
};

struct Record {
    uint8_t kind;
    uint8_t number;
    uint8_t table_id;  // the table in which the record was swapped
    uint8_t line;      // the founding from which the record descends
    uint8_t parent;
    Set members;
    uint8_t commits;  // bits of streams
    uint8_t decides;  // 0: says nothing about rounds under way
    uint8_t step;     // inner step
    uint8_t source;   // whose checkpoint is the state; kNone
    Set entered_by;   // ever
    Set open_to;      // OPEN under way to them
};

struct State {
    std::array<Process, kProcesses> processes;
    std::array<Attempt, kAttempts> attempts;
    std::array<Record, kRecords> records;
    // By record and stream: the processes that have ever voted in, and applied, the round.
    std::array<std::array<Set, kStreams>, kRecords> voted;
    std::array<std::array<Set, kStreams>, kRecords> applied;
    // The record in the table, and in the table of another store; kNone for an empty table.
    std::array<uint8_t, 2> tables;
    uint8_t crashes, forgets, losses, leaves, proposals;  // still possible
    uint8_t is_cut;                                       // no way between the last two members
};
static_assert(std::is_trivially_copyable<State>::value && alignof(State) == 1);

inline bool operator==(const State& a, const State& b) {
    return std::memcmp(&a, &b, sizeof(State)) == 0;
}

inline uint64_t hash_of(const State& state) {
    constexpr size_t kWords = (sizeof(State) + 7) / 8;
    uint64_t words[kWords] = {};
    std::memcpy(words, &state, sizeof(State));
    unsigned __int128 product = 0;
    uint64_t hash = 0x9e3779b97f4a7c15u;
    for (const uint64_t word : words) {
        product = static_cast<unsigned __int128>(hash ^ word) * 0xd6e8feb86659fd93u;
        hash = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64) ^ 0xa0761d64u;
    }
    hash ^= hash >> 29;
    hash *= 0xbf58476d1ce4e5b9u;
    return hash ^ hash >> 32;
}

}  // namespace agreement
