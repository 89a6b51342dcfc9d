// The members' reports after a failure, and the verdict on which members go on. Plain values: the
// verdict is made once, put on the store, and read by all members.
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

// The report of one member.
struct Report {
    bool is_here = false;         // alive: has reported a failure, or answered another's report
    bool is_idle = false;         // in no exchange
    bool waited_in_vain = false;  // for a header, up to the timeout
    bool has_left = false;
    int64_t inner_step = -1;  // of the departure
    bool has_tried = false;   // to connect to the other members, with these results
    std::vector<int64_t> reached;
    std::vector<int64_t> unreached;
    std::vector<int64_t> goes_on_with;  // the next group, of a member that left this one for it
};

using Reports = std::map<int64_t, Report>;              // of every member
using Cuts = std::vector<std::pair<int64_t, int64_t>>;  // pairs that cannot reach each other

struct Verdict {
    std::vector<int64_t> survivors;  // alive, and each reaches each
    std::vector<int64_t> missing;    // all other members
    std::vector<int64_t> silent;     // neither reported nor answered
    std::vector<int64_t> idle;
    std::vector<Departure> left;
    Cuts cuts;
    std::vector<int64_t> left_out;  // not in a group that others form, without a failure
};

Verdict decide(const Reports& reports);

// Pairs in which one member reports that it cannot connect to the other, and neither that it can: a
// firewall may let connections through in one direction alone.
Cuts find_cuts(const Reports& reports);

// The largest subset of the sorted `members` without a pair in `cuts`. Among equally large subsets,
// the first in lexicographic order.
std::vector<int64_t> largest_reaching(const std::vector<int64_t>& members, const Cuts& cuts);

// A report as text: one line for each list, a name and numbers. An empty text is an empty report.
std::string to_text(const Verdict& verdict);
std::string to_text(const Report& report);
Verdict verdict_from_text(const std::string& text);
Report report_from_text(const std::string& text);

}  // namespace diloco
