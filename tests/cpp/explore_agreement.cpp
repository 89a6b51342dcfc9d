// Goes through all states of the agreement within given bounds: see --help.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "agreement/search.h"

using namespace agreement;

int main(int argc, char** argv) {
    Config config;
    Options options;
    const std::map<std::string, int Config::*> numbers = {
        {"members", &Config::members}, {"newcomers", &Config::newcomers}, {"attempts", &Config::attempts},
        {"proposals", &Config::proposals}, {"last", &Config::last}, {"rounds", &Config::rounds},
        {"streams", &Config::streams}, {"crashes", &Config::crashes}, {"forgets", &Config::forgets},
        {"losses", &Config::losses}, {"leaves", &Config::leaves}, {"demands", &Config::demands},
        {"restarts", &Config::restarts}, {"cuts", &Config::cuts}, {"checkpoints", &Config::checkpoints},
        {"min_replicas", &Config::min_replicas}};
    const std::map<std::string, bool Config::*> features = {
        {"founding", &Config::founding}, {"revival", &Config::revival}, {"joins", &Config::joins},
        {"planned", &Config::planned}, {"finish", &Config::finish}, {"answers", &Config::answers},
        {"repeats", &Config::repeats}, {"zombies", &Config::zombies}, {"ready", &Config::ready},
        {"all_lost", &Config::all_lost}, {"swaps_into_empty", &Config::swaps_into_empty},
        {"replays", &Config::replays}, {"strict", &Config::strict}};
    for (int k = 1; k < argc; ++k) {
        const std::string word = argv[k];
        const size_t equal = word.find('=');
        const std::string key = word.substr(0, equal);
        const int value = equal == std::string::npos ? 1 : std::atoi(word.c_str() + equal + 1);
        if (numbers.count(key)) config.*numbers.at(key) = value;
        else if (features.count(key)) config.*features.at(key) = value != 0;
        else if (key == "mutant") config.mutant = static_cast<Mutant>(value);
        else if (key == "binding") config.binding = static_cast<Binding>(value);
        else if (key == "most") options.most = size_t(value);
        else if (key == "live") options.checks_liveness = value != 0;
        else { std::fprintf(stderr, "unknown %s\n", key.c_str()); return 2; }
    }
    const Rules rules(config);
    const Found found = search(rules, options);
    std::printf("%zu states, %zu events, %.1f s, %s%s, broken: %s\n", found.num_states, found.num_events,
                found.seconds, found.is_exhaustive ? "exhaustive" : "not exhausted",
                rules.num_truncated ? " (records short)" : "", found.broken.empty() ? "nothing" : found.broken.c_str());
    int line = 0;
    for (const Event& event : found.trail) std::printf("%3d. %s\n", ++line, sentence(event).c_str());
}
