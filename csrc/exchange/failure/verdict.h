// Who goes on after a failure: what the members have said, and what follows from it. Plain values:
// the verdict is made once, put on the store, and read by all members.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace diloco {

struct Departure {
    int64_t replica;
    int64_t inner_step;
};

// What one member has said.
struct Report {
    bool is_here = false;         // it lives: has reported a failure, or answered that of another
    bool is_idle = false;         // in no exchange
    bool waited_in_vain = false;  // for a header, up to the timeout
    bool has_left = false;
    int64_t inner_step = -1;  // when it left
    bool has_tried = false;   // to connect to the others, with these results
    std::vector<int64_t> reached;
    std::vector<int64_t> unreached;
};

using Reports = std::map<int64_t, Report>;              // of every member
using Cuts = std::vector<std::pair<int64_t, int64_t>>;  // pairs that cannot reach each other

struct Verdict {
    std::vector<int64_t> survivors;  // they live, and each reaches each
    std::vector<int64_t> missing;    // all other members
    std::vector<int64_t> silent;     // neither reported nor answered
    std::vector<int64_t> idle;
    std::vector<Departure> left;
    Cuts cuts;
    std::vector<int64_t> left_out;  // of a group that others have formed, without a failure
};

Verdict decide(const Reports& reports);

// Pairs of which one says that it cannot connect to the other, and none that it can: a firewall may
// let connections through in one direction alone.
Cuts find_cuts(const Reports& reports);

// The largest subset of the sorted `members` without a pair in `cuts`. Of several, the one whose
// lowest members are lowest.
std::vector<int64_t> largest_reaching(const std::vector<int64_t>& members, const Cuts& cuts);

// One line for each list: a name, and numbers. An empty text is the report of one that has said
// nothing.
std::string to_text(const Verdict& verdict);
std::string to_text(const Report& report);
Verdict verdict_from_text(const std::string& text);
Report report_from_text(const std::string& text);

}  // namespace diloco
