// Goes through all states of the agreement of a group within given bounds.
//
//   explore_agreement --members 2 --features crash,planned --bounds crashes=2,last=3 [--live]
//   explore_agreement --mutant blind-swap      whether the model of a mutant notices the mutant
//   explore_agreement --list                   features, bounds, mutants
//
// The exit status is 0 if nothing is broken in all states, or if a mutant breaks the invariant that
// is expected; 1 if not, or if the states are more than --most; 2 for a wrong command line.
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>

#include "agreement/catalogue.h"
#include "agreement/search.h"

using namespace agreement;

namespace {

void list() {
    std::puts("features:");
    for (const Feature& one : all_features()) std::printf("  %-22s %s\n", one.name, one.what);
    std::puts("mutants:");
    for (const MutantEntry& one : all_mutants()) {
        std::printf("  %-22s %s: breaks %s with %d members, %s %s\n", one.name, one.what, one.expected,
                    one.members, one.features, one.bounds);
    }
}

const MutantEntry& mutant_of(const std::string& name) {
    for (const MutantEntry& one : all_mutants()) {
        if (name == one.name) return one;
    }
    throw std::invalid_argument("there is no mutant " + name);
}

int report(const Rules& rules, const Found& found, const std::string& expected, const Options& options) {
    std::printf("%zu states, %zu events, %.1f s, %s, %s%s\n", found.num_states, found.num_events,
                found.seconds, found.is_exhaustive ? "exhaustive" : "not exhausted",
                options.checks_liveness ? "with liveness, " : "",
                found.broken.empty() ? "nothing is broken"
                                     : (std::to_string(found.trail.size()) + " events break " + found.broken).c_str());
    if (rules.num_truncated > 0) std::puts("the records were too few: take lower bounds");
    int line = 0;
    for (const Event& event : found.trail) std::printf("%3d. %s\n", ++line, sentence(event).c_str());
    if (expected.empty()) return found.is_exhaustive && found.broken.empty() ? 0 : 1;
    return found.broken.compare(0, expected.size(), expected) == 0 ? 0 : 1;
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
        } else if (word == "--most") {
            options.most = std::stoull(value());
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
    if (config.members < 2 || config.members > kProcesses) {
        throw std::invalid_argument("the members are 2 to " + std::to_string(kProcesses));
    }
    turn_on(config, features);
    set_bounds(config, bounds);
    if (config.members + config.newcomers > kProcesses || config.attempts > kAttempts ||
        config.last >= kRecords || config.streams > kStreams) {
        throw std::invalid_argument("the bounds are too large");
    }
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
