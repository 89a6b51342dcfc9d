#include "exchange/engine/words.h"

#include <cstdio>
#include <sstream>

namespace diloco {

std::string rounded(double seconds) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.1f", seconds);
    return text;
}

std::string subject_of(const Header& header) {
    std::ostringstream text;
    const auto kind = static_cast<Kind>(header.kind);
    text << (kind == Kind::kObjects ? "an agreement among all replicas" : kind_name(kind));
    if (kind == Kind::kSync || kind == Kind::kFlush) {
        text << " of fragment " << header.fragment << ", round " << header.round;
    }
    return text.str();
}

}  // namespace diloco
