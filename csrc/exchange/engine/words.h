// Parts of the engine's messages to people.
#pragma once

#include <string>

#include "exchange/transport/message.h"

namespace diloco {

// Seconds with one decimal: "1.5".
std::string rounded(double seconds);

// A few words for the job of a header, such as "sync of fragment 0, round 3".
std::string subject_of(const Header& header);

}  // namespace diloco
