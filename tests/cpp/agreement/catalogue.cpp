#include "catalogue.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace agreement {
namespace {

void at_least(int& bound, int value) { bound = std::max(bound, value); }

std::vector<std::string> words(const std::string& text) {
    std::vector<std::string> found;
    std::istringstream in(text);
    for (std::string word; std::getline(in, word, ',');) {
        if (!word.empty()) found.push_back(word);
    }
    return found;
}

struct Bound {
    const char* name;
    int Config::* member;
};

const Bound kBounds[] = {
    {"attempts", &Config::attempts},
    {"checkpoints", &Config::checkpoints},
    {"crashes", &Config::crashes},
    {"forgets", &Config::forgets},
    {"last", &Config::last},
    {"leaves", &Config::leaves},
    {"losses", &Config::losses},
    {"newcomers", &Config::newcomers},
    {"proposals", &Config::proposals},
    {"rounds", &Config::rounds},
    {"streams", &Config::streams},
    {"demands", &Config::demands},
    {"cuts", &Config::cuts},
    {"members", &Config::members},
    {"min_replicas", &Config::min_replicas},
};

}  // namespace

const std::vector<Feature>& all_features() {
    static const std::vector<Feature> features = {
        {"crash", "a process dies", [](Config& c) { at_least(c.crashes, 1); }},
        {"restart", "a process dies, starts again with its number, and joins",
         [](Config& c) {
             at_least(c.crashes, 1);
             at_least(c.newcomers, 1);
             at_least(c.rounds, 2);
             c.restarts = c.joins = true;
         }},
        {"zombie", "a number starts again while its old process lives, and joins",
         [](Config& c) {
             at_least(c.newcomers, 1);
             at_least(c.rounds, 2);
             c.restarts = c.zombies = c.joins = true;
         }},
        {"loss", "a message is lost", [](Config& c) { at_least(c.losses, 1); }},
        {"repeat", "a relay repeats every message as often as it likes",
         [](Config& c) {
             c.repeats = true;
             at_least(c.proposals, 3);
         }},
        {"cut", "the way between the last two members goes; READY apart from SEALED",
         [](Config& c) {
             at_least(c.cuts, 1);
             c.ready = true;
         }},
        {"streams", "two streams, that is fragments or workers, with decisions of their own",
         [](Config& c) { c.streams = 2; }},
        {"rounds", "the record after the first one has rounds under way, too",
         [](Config& c) { at_least(c.rounds, 2); }},
        {"planned", "planned changes", [](Config& c) { c.planned = true; }},
        {"join", "a process with a new number follows, is ready, and joins",
         [](Config& c) {
             at_least(c.newcomers, 1);
             c.joins = true;
         }},
        {"found", "at first there is no record; newcomers have checkpoints",
         [](Config& c) {
             c.founding = true;
             at_least(c.checkpoints, 1);
         }},
        {"revive", "all die, and start again with their numbers and checkpoints",
         [](Config& c) {
             at_least(c.crashes, c.members);
             at_least(c.newcomers, 2);
             at_least(c.checkpoints, 1);
             c.restarts = c.revival = true;
         }},
        {"rollback", "all die, and newcomers may go back behind the record",
         [](Config& c) {
             at_least(c.crashes, c.members);
             at_least(c.newcomers, 2);
             c.restarts = c.revival = c.all_lost = true;
         }},
        {"forget", "the table loses its record", [](Config& c) { at_least(c.forgets, 1); }},
        {"answers", "the request of a swap and its answer travel, and may be lost",
         [](Config& c) { c.answers = true; }},
        {"demand", "change_group: each caller names any set",
         [](Config& c) {
             at_least(c.crashes, 1);
             at_least(c.newcomers, 1);
             c.demands = c.members;
             c.restarts = true;
         }},
        {"leave", "a member leaves", [](Config& c) { at_least(c.leaves, 1); }},
        {"move", "the callers name another store, one after another",
         [](Config& c) { c.moves = true; }},
        {"finish", "the run ends", [](Config& c) { c.finish = true; }},
    };
    return features;
}

const std::vector<MutantEntry>& all_mutants() {
    using M = Mutant;
    static const std::vector<MutantEntry> mutants = {
        {M::kNoPromise, "no-promise", "who has sealed votes and applies on", 2, "", "", "I1"},
        {M::kAppliedOnly, "applied-only", "a round commits iff somebody has applied the round", 2,
         "", "", "I1"},
        {M::kOpenWithoutOne, "open-without-one", "one SEALED may lack at the swap", 2, "", "",
         "I1"},
        {M::kBlindSwap, "blind-swap", "the table compares nothing", 2, "", "", "I4"},
        {M::kNoNonce, "no-nonce", "PREPARE reaches whoever has the number", 2, "restart", "", "I1"},
        {M::kPlannedOwnPosition, "planned-own-position",
         "a planned change commits what its proposer has applied", 2, "planned", "", "I2"},
        {M::kPlannedRoundK, "planned-round-k",
         "a planned change needs the votes of the round that asked for it", 2, "planned,streams",
         "", "I2"},
        {M::kPlannedFirstVotes, "planned-first-votes",
         "a planned change looks at the votes of one worker", 2, "planned,streams", "", "I3"},
        {M::kOneMeet, "one-meet", "one bit for all workers", 2, "streams", "", "I1"},
        {M::kFoundWithState, "found-with-state", "newcomers found though somebody has state", 2,
         "found,forget,join", "newcomers=2", "I6"},
        {M::kStaleFollower, "stale-follower", "a newcomer's READY of an older record counts", 2,
         "join", "rounds=2", "I3"},
        {M::kNewcomerVotes, "newcomer-votes", "a newcomer's SEALED counts as 'has not voted'", 2,
         "demand", "", "I1"},
        {M::kEmptyDecides, "empty-decides", "no SEALED of the base makes all rounds void", 2,
         "revive", "", "I1"},
        {M::kNoReady, "no-ready", "the proposer does not wait for READY", 3, "cut", "", "I8"},
        {M::kLeaverLeavesAtOnce, "leaver-leaves", "a leaver with the only state does not wait", 2,
         "leave,join", "", "I6"},
        {M::kReviveLiving, "revive-living", "newcomers swap though a member lives", 2, "revive", "",
         "I6"},
        {M::kReviveBehind, "revive-behind", "newcomers swap with an older checkpoint", 2, "revive",
         "", "I6"},
        {M::kAfterFinish, "after-finish", "a record follows the finished one", 2, "finish", "",
         "I7"},
        {M::kStatelessProposes, "stateless-proposes", "members without state leave out who has it",
         2, "found", "", "I6"},
        {M::kOtherDemand, "other-demand", "an answer to a set that the caller did not name", 2,
         "demand", "", "I9"},
        {M::kAnyRecordAnswers, "any-record-answers", "an answer without the base", 3, "join", "",
         "I5"},
        {M::kOldAttempt, "old-attempt", "SEALED for a former table counts for the next one", 3,
         "forget,answers", "", "I4"},
        {M::kOldVotes, "old-votes", "votes of the record before count for its successor", 2,
         "rounds", "", "I1"},
        {M::kNewcomerHearsOpen, "newcomer-hears-open", "a newcomer enters by OPEN", 2,
         "restart,found", "", "I5"},
        {M::kRequestsSurvive, "requests-survive",
         "a swap that was asked for before the table forgot is made", 2, "found,forget,answers", "",
         "I6"},
        {M::kTwoOfOneNumber, "two-of-one-number", "a planned change takes two of one number", 2,
         "zombie", "newcomers=2", "I5"},
        {M::kNewTableMajority, "new-table-majority",
         "a majority of SEALED is enough for an empty table of another id", 3, "forget", "", "I4"},
        {M::kNewTableLiving, "new-table-living", "SEALED of all that live is enough there", 3,
         "crash,forget", "", "I4"},
        {M::kLateAnswer, "late-answer",
         "a process that sealed for a new table learns of its swap in the former one", 2,
         "forget,answers", "", "I4"},
        {M::kNewcomerFirst, "newcomer-first", "a newcomer enters before a member of the base knows",
         2, "forget,join,answers", "", "I4"},
        {M::kPlannedUnsealed, "planned-unsealed",
         "planned changes into another table without SEALED", 2, "planned,forget,answers", "",
         "I4"},
    };
    return mutants;
}

void turn_on(Config& config, const std::string& names) {
    for (const std::string& name : words(names)) {
        const auto& features = all_features();
        const auto at = std::find_if(features.begin(), features.end(),
                                     [&](const Feature& one) { return name == one.name; });
        if (at == features.end()) throw std::invalid_argument("there is no feature " + name);
        at->turn_on(config);
    }
}

void set_bounds(Config& config, const std::string& bounds) {
    for (const std::string& word : words(bounds)) {
        const size_t equal = word.find('=');
        const std::string name = word.substr(0, equal);
        const auto at = std::find_if(std::begin(kBounds), std::end(kBounds),
                                     [&](const Bound& one) { return name == one.name; });
        if (at == std::end(kBounds) || equal == std::string::npos) {
            throw std::invalid_argument("there is no bound " + word);
        }
        config.*at->member = std::stoi(word.substr(equal + 1));
    }
}

}  // namespace agreement
