// The names of features, bounds and mutants, and for each mutant a model that notices it.
#pragma once

#include <string>
#include <vector>

#include "state.h"

namespace agreement {

struct Feature {
    const char* name;
    const char* what;
    void (*turn_on)(Config&);
};

struct MutantEntry {
    Mutant mutant;
    const char* name;
    const char* what;
    int members;
    const char* features;
    const char* bounds;
    const char* expected;  // the invariant that it breaks
};

const std::vector<Feature>& all_features();
const std::vector<MutantEntry>& all_mutants();

// Each takes words with commas between them, and throws std::invalid_argument for unknown ones.
void turn_on(Config& config, const std::string& features);
void set_bounds(Config& config, const std::string& bounds);

}  // namespace agreement
