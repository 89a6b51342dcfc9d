// How the engine's sentences name things.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "exchange/failure/verdict.h"
#include "exchange/transport/message.h"

namespace diloco {

// "1, 2", and "replica 1" or "replicas 1, 2".
std::string list_of(const std::vector<int64_t>& values);
std::string replicas_of(const std::vector<int64_t>& values);

// "replicas 1 and 2 live but cannot reach each other", for each pair.
std::string cuts_of(const Cuts& cuts);

// "1.5".
std::string rounded(double seconds);

// "sync of fragment 0, round 3".
std::string subject_of(const Header& header);

}  // namespace diloco
