// Goes through all states of the agreement of a group within given bounds.
//
//   explore_agreement --members 2 --features crash,planned --bounds crashes=2,last=3 [--live]
//   explore_agreement --mutant blind-swap      whether the model of a mutant notices the mutant
//   explore_agreement --scenario no-way        a sequence of events, and its forbidden end
//   explore_agreement --list                   the names of features, mutants and scenarios
//
// --outcomes counts states that differ for the rounds; with --whole no states are taken for one,
// which needs a bound on proposals and must give the same outcomes. --live also looks for states
// from which no common record can be reached without faults. The exit status is 0 if nothing is
// broken in all states, or if a mutant breaks the invariant that is expected; 1 if not, or if the
// states are more than --most; 2 for a wrong command line.
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>

#include "agreement/catalogue.h"
#include "agreement/scenarios.h"
#include "agreement/search.h"

using namespace agreement;

namespace {

void list() {
    std::puts("features:");
    for (const Feature& one : all_features()) std::printf("  %-22s %s\n", one.name, one.what);
    std::puts("mutants:");
    for (const MutantEntry& one : all_mutants()) {
        std::printf("  %-22s %s: breaks %s with %d members, %s %s\n", one.name, one.what,
                    one.expected, one.members, one.features, one.bounds);
    }
    std::puts("scenarios:");
    for (const Scenario& one : all_scenarios()) std::printf("  %-22s %s\n", one.name, one.what);
}

const MutantEntry& mutant_of(const std::string& name) {
    for (const MutantEntry& one : all_mutants()) {
        if (name == one.name) return one;
    }
    throw std::invalid_argument("there is no mutant " + name);
}

int report(const Rules& rules, const Found& found, const std::string& expected,
           const Options& options) {
    std::printf(
        "%zu states, %zu events, %.1f s, %s, %s%s\n", found.num_states, found.num_events,
        found.seconds, found.is_exhaustive ? "exhaustive" : "not exhausted",
        options.checks_liveness ? "with liveness, " : "",
        found.broken.empty()
            ? "nothing is broken"
            : (std::to_string(found.trail.size()) + " events break " + found.broken).c_str());
    if (rules.num_truncated > 0) std::puts("the records were too few: take lower bounds");
    if (options.counts_outcomes) {
        std::printf("%zu outcomes with the sum %016llx\n", found.num_outcomes,
                    static_cast<unsigned long long>(found.outcomes));
    }
    std::printf("seen:");
    for (int k = 0; k < kActs; ++k) {
        if (found.seen[k] > 0) std::printf(" %s %zu", name_of(Act(k)), found.seen[k]);
    }
    std::puts("");
    int line = 0;
    for (const Event& event : found.trail)
        std::printf("%3d. %s\n", ++line, sentence(event).c_str());
    if (expected.empty()) return found.is_exhaustive && found.broken.empty() ? 0 : 1;
    return found.broken.compare(0, expected.size(), expected) == 0 ? 0 : 1;
}

Config config_of(int members, const std::string& features, const std::string& bounds) {
    Config config;
    config.members = members;
    turn_on(config, features);
    set_bounds(config, bounds);
    if (config.members < 2 || config.members + config.newcomers > kProcesses ||
        config.attempts > kAttempts || config.last >= kRecords || config.streams > kStreams) {
        throw std::invalid_argument("the bounds are too large, or there is one member");
    }
    return config;
}

// Whether the model permits a scenario and its end, and forbids the end that must never be.
bool holds(const Scenario& scenario) {
    const Config config = config_of(scenario.members, scenario.features, scenario.bounds);
    Config broken = config;
    broken.mutant = scenario.mutant;
    Options reaches, never;
    reaches.target = scenario.reaches;
    never.target = scenario.never;
    State after_script = Rules(config).start();
    const size_t num_taken = follow(Rules(config), scenario.script, after_script);
    reaches.start = &after_script;
    const Found way = search(Rules(config), reaches);
    const Found whole = search(Rules(config), never);
    const Found other = search(Rules(broken), never);
    const bool is_permitted = num_taken == scenario.script.size() && way.was_reached;
    const bool is_kept = whole.is_exhaustive && !whole.was_reached && whole.broken.empty();
    const bool is_noticed = other.was_reached || !other.broken.empty();
    std::printf("%s: %s\n", scenario.name, scenario.what);
    int line = 0;
    for (size_t k = 0; k < num_taken; ++k) std::printf("  %3d. %s\n", ++line, scenario.script[k]);
    if (num_taken < scenario.script.size()) {
        std::printf("  IS NOT PERMITTED: %s\n", scenario.script[num_taken]);
    }
    std::puts("  then:");
    for (const Event& event : way.trail)
        std::printf("  %3d. %s\n", ++line, sentence(event).c_str());
    std::printf(
        "  %s; what must not be is %s in %zu states; the mutant is %s after %zu events%s%s\n",
        is_permitted ? "the end is reached" : "THE END IS NOT REACHED",
        is_kept ? "impossible" : "POSSIBLE", whole.num_states,
        is_noticed ? "noticed" : "NOT NOTICED", other.trail.size(),
        other.broken.empty() ? "" : ": ", other.broken.c_str());
    if (!is_kept) {
        line = 0;
        for (const Event& event : whole.trail)
            std::printf("  %3d! %s\n", ++line, sentence(event).c_str());
    }
    return is_permitted && is_kept && is_noticed;
}

int run(int argc, char** argv) {
    Config config;
    Options options;
    std::string features, bounds, mutant;
    bool has_members = false;
    for (int k = 1; k < argc; ++k) {
        const std::string word = argv[k];
        const auto value = [&]() -> std::string {
            if (++k == argc) throw std::invalid_argument(word + " needs a value");
            return argv[k];
        };
        if (word == "--list") {
            list();
            return 0;
        } else if (word == "--members") {
            config.members = std::stoi(value());
            has_members = true;
        } else if (word == "--features") {
            features = value();
        } else if (word == "--bounds") {
            bounds = value();
        } else if (word == "--mutant") {
            mutant = value();
        } else if (word == "--scenario") {
            const std::string name = value();
            bool is_found = false, all_hold = true;
            for (const Scenario& one : all_scenarios()) {
                if (name != "all" && name != one.name) continue;
                is_found = true;
                all_hold = holds(one) && all_hold;
            }
            if (!is_found) throw std::invalid_argument("there is no scenario " + name);
            return all_hold ? 0 : 1;
        } else if (word == "--most") {
            options.most = std::stoull(value());
        } else if (word == "--outcomes") {
            options.counts_outcomes = true;
        } else if (word == "--whole") {
            config.prunes = false;
        } else if (word == "--live") {
            options.checks_liveness = true;
        } else {
            throw std::invalid_argument("there is no option " + word);
        }
    }
    std::string expected;
    if (!mutant.empty()) {
        const MutantEntry& entry = mutant_of(mutant);
        config.mutant = entry.mutant;
        expected = entry.expected;
        options.checks_liveness = expected[0] == 'L';
        if (!has_members && features.empty() && bounds.empty()) {
            config.members = entry.members;
            features = entry.features;
            bounds = entry.bounds;
        }
    }
    Config whole = config_of(config.members, features, bounds);
    whole.mutant = config.mutant;
    whole.prunes = config.prunes;
    config = whole;
    const Rules rules(config);
    return report(rules, search(rules, options), expected, options);
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return run(argc, argv);
    } catch (const std::invalid_argument& error) {
        std::fprintf(stderr, "explore_agreement: %s\n", error.what());
        return 2;
    }
}
