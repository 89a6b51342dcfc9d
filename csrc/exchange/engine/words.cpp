#include "exchange/engine/words.h"

#include <cstdio>
#include <sstream>

namespace diloco {

std::string list_of(const std::vector<int64_t>& values) {
    std::ostringstream text;
    for (size_t i = 0; i < values.size(); ++i) text << (i ? ", " : "") << values[i];
    return text.str();
}

std::string replicas_of(const std::vector<int64_t>& values) {
    return (values.size() == 1 ? "replica " : "replicas ") + list_of(values);
}

std::string cuts_of(const Cuts& cuts) {
    std::ostringstream text;
    for (size_t i = 0; i < cuts.size(); ++i) {
        text << (i ? ", and " : "") << "replicas " << cuts[i].first << " and " << cuts[i].second
             << " live but cannot reach each other";
    }
    return text.str();
}

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
