// How the engine's sentences name things.
#pragma once

#include <string>

#include "exchange/transport/message.h"

namespace diloco {

// "1.5".
std::string rounded(double seconds);

// "sync of fragment 0, round 3".
std::string subject_of(const Header& header);

}  // namespace diloco
