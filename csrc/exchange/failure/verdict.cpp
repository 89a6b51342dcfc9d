#include "exchange/failure/verdict.h"

#include <algorithm>
#include <set>
#include <sstream>

namespace diloco {
namespace {

bool has(const std::vector<int64_t>& values, int64_t value) {
    return std::find(values.begin(), values.end(), value) != values.end();
}

using Neighbours = std::map<int64_t, std::set<int64_t>>;

// Tries with and without the lowest member that is in a cut. The first set found of each size has
// the lowest members, so only a larger set replaces the best one.
class Search {
  public:
    explicit Search(const Neighbours& cut_from) : cut_from_(cut_from) {}

    void run(std::vector<int64_t> open, std::vector<int64_t> chosen) {
        if (chosen.size() + open.size() <= best.size() || num_steps_++ > kMostSteps) return;
        const auto in_cut = std::find_if(open.begin(), open.end(), [&](int64_t member) {
            return std::any_of(open.begin(), open.end(),
                               [&](int64_t other) { return cut_from_.at(member).count(other); });
        });
        if (in_cut == open.end()) {
            chosen.insert(chosen.end(), open.begin(), open.end());
            best = std::move(chosen);
            return;
        }
        const int64_t member = *in_cut;
        open.erase(in_cut);
        std::vector<int64_t> reached;
        for (const int64_t other : open) {
            if (!cut_from_.at(member).count(other)) reached.push_back(other);
        }
        std::vector<int64_t> with = chosen;
        with.push_back(member);
        run(std::move(reached), std::move(with));
        run(std::move(open), std::move(chosen));
    }

    std::vector<int64_t> best;

  private:
    // Two sites that are cut apart take a step for each member; a tangle of hundreds of cuts may
    // take for ever, and any large set will do.
    static constexpr int64_t kMostSteps = 10'000;
    const Neighbours& cut_from_;
    int64_t num_steps_ = 0;
};

void write(std::ostream& out, const char* name, const std::vector<int64_t>& values) {
    out << name;
    for (const int64_t value : values) out << ' ' << value;
    out << '\n';
}

using Lists = std::map<std::string, std::vector<int64_t>>;

Lists lists_in(const std::string& text) {
    Lists lists;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line);
        std::string name;
        words >> name;
        std::vector<int64_t>& values = lists[name];
        for (int64_t value = 0; words >> value;) values.push_back(value);
    }
    return lists;
}

// The group for which a living member has left this one; empty without such a member. At most one
// of several groups can begin.
std::vector<int64_t> next_group(const Reports& living) {
    for (const auto& [member, report] : living) {
        if (!report.goes_on_with.empty()) return report.goes_on_with;
    }
    return {};
}

}  // namespace

Cuts find_cuts(const Reports& reports) {
    Cuts cuts;
    for (auto a = reports.begin(); a != reports.end(); ++a) {
        for (auto b = std::next(a); b != reports.end(); ++b) {
            const bool is_reached =
                has(a->second.reached, b->first) || has(b->second.reached, a->first);
            const bool is_unreached =
                has(a->second.unreached, b->first) || has(b->second.unreached, a->first);
            if (is_unreached && !is_reached) cuts.emplace_back(a->first, b->first);
        }
    }
    return cuts;
}

std::vector<int64_t> largest_reaching(const std::vector<int64_t>& members, const Cuts& cuts) {
    Neighbours cut_from;
    for (const int64_t member : members) cut_from[member];
    for (const auto& [a, b] : cuts) {
        if (!cut_from.count(a) || !cut_from.count(b)) continue;
        cut_from[a].insert(b);
        cut_from[b].insert(a);
    }
    Search search(cut_from);
    search.run(members, {});
    std::sort(search.best.begin(), search.best.end());
    return search.best;
}

Verdict decide(const Reports& reports) {
    Verdict verdict;
    Reports living;
    bool waited_in_vain = false;
    for (const auto& [member, report] : reports) {
        if (report.has_left) {
            verdict.left.push_back({member, report.inner_step});
        } else if (!report.is_here) {
            verdict.silent.push_back(member);
        } else {
            living.emplace(member, report);
            if (report.is_idle) verdict.idle.push_back(member);
            waited_in_vain = waited_in_vain || report.waited_in_vain;
        }
    }
    verdict.cuts = find_cuts(living);
    const std::vector<int64_t> next = next_group(living);
    std::vector<int64_t> candidates;
    const bool all_live = verdict.left.empty() && verdict.silent.empty() && verdict.cuts.empty();
    for (const auto& [member, report] : living) {
        if (!next.empty() && !has(next, member)) {
            verdict.left_out.push_back(member);
            continue;
        }
        // All members live: the missing ones are those in no exchange.
        if (!(waited_in_vain && all_live && report.is_idle)) candidates.push_back(member);
    }
    verdict.survivors = largest_reaching(candidates, verdict.cuts);
    for (const auto& [member, report] : reports) {
        if (!has(verdict.survivors, member)) verdict.missing.push_back(member);
    }
    return verdict;
}

std::string to_text(const Verdict& verdict) {
    std::ostringstream out;
    write(out, "survivors", verdict.survivors);
    write(out, "missing", verdict.missing);
    write(out, "silent", verdict.silent);
    write(out, "idle", verdict.idle);
    std::vector<int64_t> pairs;
    for (const Departure& gone : verdict.left) {
        pairs.insert(pairs.end(), {gone.replica, gone.inner_step});
    }
    write(out, "left", pairs);
    pairs.clear();
    for (const auto& [a, b] : verdict.cuts) pairs.insert(pairs.end(), {a, b});
    write(out, "cuts", pairs);
    write(out, "left_out", verdict.left_out);
    return out.str();
}

std::string to_text(const Report& report) {
    std::ostringstream out;
    if (report.is_here) write(out, "here", {});
    if (report.is_idle) write(out, "idle", {});
    if (report.waited_in_vain) write(out, "in_vain", {});
    if (report.has_left) write(out, "left", {report.inner_step});
    if (report.has_tried) {
        write(out, "reached", report.reached);
        write(out, "unreached", report.unreached);
    }
    if (!report.goes_on_with.empty()) write(out, "goes_on_with", report.goes_on_with);
    return out.str();
}

Report report_from_text(const std::string& text) {
    Lists lists = lists_in(text);
    Report report;
    report.is_here = lists.count("here") > 0;
    report.is_idle = lists.count("idle") > 0;
    report.waited_in_vain = lists.count("in_vain") > 0;
    report.has_left = lists.count("left") > 0;
    report.has_tried = lists.count("reached") > 0;
    if (!lists["left"].empty()) report.inner_step = lists["left"].front();
    report.reached = lists["reached"];
    report.unreached = lists["unreached"];
    report.goes_on_with = lists["goes_on_with"];
    return report;
}

Verdict verdict_from_text(const std::string& text) {
    Lists lists = lists_in(text);
    Verdict verdict;
    verdict.survivors = lists["survivors"];
    verdict.missing = lists["missing"];
    verdict.silent = lists["silent"];
    verdict.idle = lists["idle"];
    verdict.left_out = lists["left_out"];
    const auto& left = lists["left"];
    for (size_t i = 0; i + 1 < left.size(); i += 2) verdict.left.push_back({left[i], left[i + 1]});
    const auto& cuts = lists["cuts"];
    for (size_t i = 0; i + 1 < cuts.size(); i += 2) verdict.cuts.emplace_back(cuts[i], cuts[i + 1]);
    return verdict;
}

}  // namespace diloco
