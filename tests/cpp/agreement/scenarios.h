// Named sequences of events that broke, or might have broken, an agreement: where each may lead.
#pragma once

#include <string>
#include <vector>

#include "rules.h"

namespace agreement {

struct Scenario {
    const char* name;
    const char* what;
    int members;
    const char* features;
    const char* bounds;
    // The sequence: events that the model must permit one after another, each by its sentence.
    std::vector<const char*> script;
    // The model must permit this state some time after the script.
    bool (*reaches)(const State&);
    // The model must not permit this state, with or without the script.
    bool (*never)(const State&);
    // With this mutant the forbidden state can be reached, or an invariant breaks.
    Mutant mutant;
};

const std::vector<Scenario>& all_scenarios();

}  // namespace agreement
