#include "exchange/transport/message.h"

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace diloco {
namespace {

struct Field {
    const char* name;
    std::function<std::string(const Header&)> value;
};

// A number as people read it. The header's uint64_t numbers are hashes, and shown in hexadecimal.
template <typename Number>
std::string text_of(Number value) {
    char text[32];
    if constexpr (std::is_same_v<Number, uint64_t>) {
        std::snprintf(text, sizeof(text), "0x%016" PRIx64, value);
    } else if constexpr (std::is_same_v<Number, double>) {
        std::snprintf(text, sizeof(text), "%.9g", value);
    } else {
        return std::to_string(value);
    }
    return text;
}

std::string wire_name(const Header& header) {
    return std::string(header.wire, strnlen(header.wire, sizeof(header.wire)));
}

std::vector<Field> make_fields() {
    std::vector<Field> fields = {
        {"protocol version", [](const Header& h) { return std::to_string(h.protocol); }},
        {"kind", [](const Header& h) { return std::string(kind_name(Kind(h.kind))); }},
        {"wire", wire_name},
        {"rounding",
         [](const Header& h) { return std::string(h.flags & 1 ? "stochastic" : "nearest"); }},
    };
    visit_numbers([&](const char*, auto member, const char* label) {
        if (label) fields.push_back({label, [=](const Header& h) { return text_of(h.*member); }});
    });
    return fields;
}

const std::vector<Field>& compared_fields() {
    static const std::vector<Field> fields = make_fields();
    return fields;
}

std::string describe(const Field& field, const std::vector<Header>& headers) {
    std::vector<std::pair<std::string, std::vector<int64_t>>> groups;
    for (const Header& header : headers) {
        const std::string value = field.value(header);
        auto group = groups.begin();
        while (group != groups.end() && group->first != value) ++group;
        if (group == groups.end()) group = groups.insert(group, {value, {}});
        group->second.push_back(header.replica);
    }
    if (groups.size() == 1) return "";
    std::ostringstream text;
    text << field.name << " differs between replicas: ";
    for (size_t i = 0; i < groups.size(); ++i) {
        text << (i ? "; " : "") << groups[i].first << " on "
             << (groups[i].second.size() == 1 ? "replica " : "replicas ");
        for (size_t j = 0; j < groups[i].second.size(); ++j) {
            text << (j ? ", " : "") << groups[i].second[j];
        }
    }
    return text.str();
}

}  // namespace

const char* kind_name(Kind kind) {
    switch (kind) {
        case Kind::kSync:
            return "sync";
        case Kind::kFlush:
            return "flush";
        case Kind::kAllReduce:
            return "all_reduce";
        case Kind::kObjects:
            return "exchange_objects";
        case Kind::kBroadcast:
            return "broadcast";
    }
    return "unknown";
}

Kind kind_from_name(const std::string& name) {
    for (uint32_t kind = 1; kind <= uint32_t(Kind::kBroadcast); ++kind) {
        if (name == kind_name(Kind(kind))) return Kind(kind);
    }
    throw std::invalid_argument("unknown kind of exchange '" + name + "'");
}

std::string find_mismatch(const std::vector<Header>& headers) {
    for (const Field& field : compared_fields()) {
        std::string text = describe(field, headers);
        if (!text.empty()) return text;
    }
    return "";
}

namespace {

// "3 on replica 0, 1 on replica 2", for the votes whose number is not zero.
std::string list_numbers(const std::vector<Vote>& votes, int64_t Vote::* number,
                         const std::vector<int64_t>& replicas) {
    std::ostringstream text;
    for (size_t rank = 0; rank < votes.size(); ++rank) {
        if (votes[rank].*number == 0) continue;
        text << (text.tellp() > 0 ? ", " : "") << votes[rank].*number << " on replica "
             << replicas[rank];
    }
    return text.str();
}

}  // namespace

BadElements find_bad_elements(const std::vector<Vote>& votes,
                              const std::vector<int64_t>& replicas) {
    BadElements bad;
    for (size_t rank = 0; rank < votes.size(); ++rank) {
        if (votes[rank].num_bad > 0) bad.replicas.push_back(replicas[rank]);
    }
    const std::string own = list_numbers(votes, &Vote::num_bad, replicas);
    if (!own.empty()) bad.text = "elements that are NaN, Inf or out of the wire's range: " + own;
    const std::string mean = list_numbers(votes, &Vote::num_bad_mean, replicas);
    if (mean.empty()) return bad;
    bad.text += (own.empty() ? "" : "; ") +
                std::string(
                    "elements whose mean is out of the range of its wire (2^126 = 8.5e37; 2^116 on "
                    "int2r to sub16, and where owners encode a mean; 65504 on fp16), though no "
                    "replica's own is, added up: ") +
                mean;
    bad.replicas = replicas;
    return bad;
}

std::string nothing_to_average(const std::vector<int64_t>& reset_replicas) {
    std::ostringstream text;
    text << "elements that are NaN, Inf or out of the wire's range: on "
         << (reset_replicas.size() == 1 ? "replica " : "replicas ");
    for (size_t i = 0; i < reset_replicas.size(); ++i) text << (i ? ", " : "") << reset_replicas[i];
    text << ", and no other replica has a weight";
    return text.str();
}

}  // namespace diloco
