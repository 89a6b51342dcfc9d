#include "exchange/message.h"

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace diloco {
namespace {

struct Field {
    const char* name;
    std::function<std::string(const Header&)> value;
};

std::string hex(uint64_t value) {
    char text[24];
    std::snprintf(text, sizeof(text), "0x%016" PRIx64, value);
    return text;
}

std::string number(double value) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.9g", value);
    return text;
}

std::string wire_name(const Header& header) {
    return std::string(header.wire, strnlen(header.wire, sizeof(header.wire)));
}

// In the order of what a user would want to hear first: a different configuration explains a
// different size, not the other way round.
const std::vector<Field>& compared_fields() {
    static const std::vector<Field> fields = {
        {"protocol version", [](const Header& h) { return std::to_string(h.protocol); }},
        {"kind", [](const Header& h) { return std::string(kind_name(Kind(h.kind))); }},
        {"wire", wire_name},
        {"block_size", [](const Header& h) { return std::to_string(h.block_size); }},
        {"number of fragments", [](const Header& h) { return std::to_string(h.num_fragments); }},
        {"sync_every", [](const Header& h) { return std::to_string(h.sync_every); }},
        {"fragment", [](const Header& h) { return std::to_string(h.fragment); }},
        {"round", [](const Header& h) { return std::to_string(h.round); }},
        {"num_elements", [](const Header& h) { return std::to_string(h.num_elements); }},
        {"layout_hash", [](const Header& h) { return hex(h.layout_hash); }},
        {"outer_lr", [](const Header& h) { return number(h.outer_lr); }},
        {"rounding",
         [](const Header& h) { return std::string(h.flags & 1 ? "stochastic" : "nearest"); }},
        {"number of chunks (chunk_bytes)",
         [](const Header& h) { return std::to_string(h.num_chunks); }},
        {"source_rank", [](const Header& h) { return std::to_string(h.source_rank); }},
    };
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
        case Kind::kLeave:
            return "leave";
    }
    return "unknown";
}

Kind kind_from_name(const std::string& name) {
    for (uint32_t kind = 1; kind <= uint32_t(Kind::kLeave); ++kind) {
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

}  // namespace diloco
