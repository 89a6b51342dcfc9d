// Links with keys: who may connect, who may not, and with which sentence; connections of keys that
// are removed; links with keys and without that meet.
#include <algorithm>
#include <deque>
#include <thread>

#include "link_world.h"

using namespace diloco_test;
using namespace std::chrono_literals;
using diloco::link::kLinkVersion;
using diloco::link::Status;
using diloco::link::to_hex;

namespace {

constexpr size_t kMiB = 1024 * 1024;

LinkPtr open_plain_link(const std::string& address = kAnyPort) {
    return Link::open(address, address);
}

using Parts = std::vector<std::string>;

// Both call connect() at once, and fail with sentences that say these parts.
void expect_errors(const std::vector<LinkPtr>& links, const std::vector<Places>& peers,
                   const std::vector<Parts>& parts) {
    std::vector<std::string> errors(links.size());
    const auto says_all = [&](size_t i) {
        return std::all_of(parts[i].begin(), parts[i].end(), [&](const std::string& part) {
            return errors[i].find(part) != std::string::npos;
        });
    };
    call_twice(500ms, [&](milliseconds limit) {
        std::vector<std::thread> threads;
        const std::string token = "failing " + links[0]->nonce() + std::to_string(rand());
        for (size_t i = 0; i < links.size(); ++i) {
            threads.emplace_back([&, i] {
                const int rank = static_cast<int>(i);
                errors[i] = error_of_connect(links[i], rank, peers[i], limit, 1, token);
            });
        }
        for (std::thread& thread : threads) thread.join();
        return says_all(0) && says_all(1);
    });
    for (size_t i = 0; i < links.size(); ++i) {
        for (const std::string& part : parts[i]) EXPECT(says(errors[i], part));
    }
}

void expect_flow(const Members& members, int from, int to) {
    const Bytes sent = pattern(300000, from + 7);
    Bytes received(sent.size());
    const Work recv = members[static_cast<size_t>(to)].recv(from, 99, received);
    EXPECT(members[static_cast<size_t>(from)].wait(
        members[static_cast<size_t>(from)].send(to, 99, sent)));
    EXPECT(members[static_cast<size_t>(to)].wait(recv) && received == sent);
}

void test_not_allowed() {
    const std::vector<LinkPtr> links{open_link(), open_link()};
    const std::string second = to_hex(links[1]->public_key());
    links[0]->allow({links[0]->public_key()});
    links[1]->allow(all_keys);
    const Places peers = places(links);
    expect_errors(links, {peers, peers},
                  {{"rank 1", "the key of the peer is not allowed", second},
                   {"rank 0", "does not allow this process's key"}});
    EXPECT(links[0]->counters().at("connects") == 0 && links[1]->counters().at("connects") == 0);
    EXPECT(links[0]->counters().at("strangers") > 0);
    // As soon as the key is allowed, they connect.
    links[0]->allow(all_keys);
    expect_flow(connect_all(links, "allowed"), 0, 1);
}

// A process that waits for a member without an address reads why its connection was refused.
void test_refused_guest() {
    const std::vector<LinkPtr> links{open_link(), open_link("", "")};
    links[0]->allow({});
    links[1]->allow(all_keys);
    const Places peers = places(links);
    expect_errors(links, {peers, peers},
                  {{"has not dialled this process; a connection from 127.0.0.1:",
                    "was refused: the key of the peer is not allowed"},
                   {"does not allow this process's key"}});
}

// Both keys are allowed, but the first process takes the second for one of another key.
void test_wrong_key() {
    const std::vector<LinkPtr> links{open_link(), open_link()}, other{open_link()};
    allow_all(links);
    const Places right = places(links);
    Places wrong = right;
    wrong[1].key = places(other)[0].key;
    expect_errors(links, {wrong, right},
                  {{"the process there has the key " + right[1].key + ", and not " + wrong[1].key,
                    "it has the key " + right[1].key},
                   {"knows this process by another key than " + right[1].key}});
    expect_flow(connect_all(links, "right"), 1, 0);
}

// A member with an allowed key says that it is another member.
void test_claimed_nonce() {
    const std::vector<LinkPtr> links{open_link(), open_link()};
    const std::vector<std::string> nonces{links[0]->nonce(), links[1]->nonce()};
    // Before the group, nobody knows whose nonce it is.
    Stranger early(links[0]->address());
    EXPECT(early.greet(nonces[0], kLinkVersion, nonces[1]).status ==
           static_cast<uint32_t>(Status::kWelcome));
    const Members members = connect_all(links, "group");
    EXPECT(early.is_closed());
    Stranger late(links[0]->address());
    EXPECT(late.greet(nonces[0], kLinkVersion, nonces[1]).status ==
           static_cast<uint32_t>(Status::kOtherKey));
    EXPECT(late.is_closed());
    expect_flow(members, 0, 1);
    expect_flow(members, 1, 0);
    EXPECT(links[0]->counters().at("open") == 2);
}

// A message under way, and its memory.
struct Posted {
    int rank;
    std::unique_ptr<Mapping> memory;
    Work work;
};

// Removes the key of rank 1 at rank 0 while bulk travels between them. More bulk follows until the
// link has cut some of the bulk, however late the link hears of the key.
void remove_under_way(const std::vector<LinkPtr>& links, const Members& members) {
    constexpr int kPairs = 16;
    std::deque<Posted> bulk;
    std::vector<Posted> unsent;
    const auto post = [&](int rank, int tag, bool is_send) {
        auto memory = std::make_unique<Mapping>(8 * kMiB);
        void* const data = memory->data();
        const Work work = is_send ? members[rank].send(1 - rank, tag, data, 8 * kMiB)
                                  : members[rank].recv(1 - rank, tag, data, 8 * kMiB);
        return Posted{rank, std::move(memory), work};
    };
    int tag = 0;
    const auto post_pair = [&] {
        for (const int rank : {0, 1}) {
            for (const bool is_send : {false, true}) bulk.push_back(post(rank, tag, is_send));
        }
        ++tag;
    };
    while (tag < kPairs) post_pair();
    for (const int rank : {0, 1}) {
        unsent.push_back(post(rank, 1'000'000, false));
        unsent.push_back(post(rank, 1'000'001, false));
    }
    EXPECT(members[0].wait(bulk[0].work));
    const auto begin = std::chrono::steady_clock::now();
    links[0]->allow({links[0]->public_key(), links[2]->public_key()});
    const auto is_cut = [&](Posted& posted) {
        const std::string error = members[posted.rank].error_of(posted.work);
        posted.memory->unmap();
        if (error.empty()) return false;
        const std::string peer = std::to_string(1 - posted.rank);
        EXPECT(says(error, "connection closed by peer: rank " + peer));
        if (posted.rank == 0) EXPECT(says(error, "its key is not allowed any more"));
        return true;
    };
    bool are_cut = false;
    for (int i = 0; !bulk.empty(); ++i) {
        are_cut = is_cut(bulk.front()) || are_cut;
        bulk.pop_front();
        const bool is_late = std::chrono::steady_clock::now() - begin > kEnough;
        if (i % 4 == 3 && !are_cut && !is_late) post_pair();
    }
    EXPECT(are_cut);
    for (Posted& posted : unsent) EXPECT(is_cut(posted));
    EXPECT(std::chrono::steady_clock::now() - begin < 20s);
}

// The others are not touched, and the key is welcome again once it is allowed.
void test_removed() {
    const std::vector<LinkPtr> links{open_link(), open_link(), open_link()};
    const std::vector<LinkPtr> two(links.begin(), links.begin() + 2);
    const Members members = connect_all(links, "group");
    remove_under_way(links, members);
    expect_flow(members, 0, 2);
    expect_flow(members, 2, 1);
    expect_errors(two, {places(two), places(two)},
                  {{"the key of the peer is not allowed"}, {"does not allow this process's key"}});
    links[0]->allow(all_keys);
    expect_flow(connect_all(two, "again"), 0, 1);
}

// Both hear it, whichever of them dials.
void test_plain_and_keyed() {
    const std::string has_keys = "the link there has keys, and this link has none";
    const std::string no_keys = "the link there has no keys, and this link has keys";
    for (const bool plain_listens : {true, false}) {
        for (const bool keyed_listens : {true, false}) {
            if (!plain_listens && !keyed_listens) continue;
            const auto place = [](bool listens) { return listens ? kAnyPort : ""; };
            const LinkPtr plain = open_plain_link(place(plain_listens));
            const std::string at = place(keyed_listens);
            const LinkPtr keyed = open_link(at, at);
            Places at_plain = places({plain, keyed}), at_keyed = at_plain;
            at_plain[1].key.clear();
            at_keyed[0].key = to_hex(*all_keys.begin());
            expect_errors({plain, keyed}, {at_plain, at_keyed},
                          {{keyed_listens ? has_keys : "it has keys, and this link has none"},
                           {plain_listens ? no_keys : "it has no keys, and this link has"}});
            EXPECT(plain->counters().at("open") == 0 && keyed->counters().at("open") == 0);
        }
    }
}

// Handshakes that begin and do not go on count among the handshakes of strangers; messages go on
// meanwhile.
void test_slow_handshakes() {
    const std::vector<LinkPtr> links{open_link(kAnyPort, kAnyPort, {60s, 300ms}), open_link()};
    const Members members = connect_all(links, "group");
    const int before = num_descriptors();
    // On a slow machine a handshake of the group may count, too.
    const auto num_strangers = links[0]->counters().at("strangers");
    {
        // The head of a TLS record of 512 bytes, and of a greeting in it, which never comes.
        const uint8_t head[] = {22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3};
        std::vector<std::unique_ptr<Stranger>> many;
        for (int i = 0; i < 200; ++i) {
            many.push_back(std::make_unique<Stranger>(links[0]->address()));
            many.back()->write(head, sizeof(head));
        }
        expect_flow(members, 0, 1);
        for (const auto& one : many) EXPECT(one->is_closed());
        Stranger garbage(links[0]->address());
        EXPECT(garbage.write("\x16\x03\x01\x00\x05wrong", 10) && garbage.is_closed());
    }
    for (int i = 0; i < 3000 && num_descriptors() != before; ++i) {
        std::this_thread::sleep_for(10ms);
    }
    EXPECT(num_descriptors() == before);
    EXPECT(links[0]->counters().at("strangers") == num_strangers + 201);
    expect_flow(members, 1, 0);
}

// Strangers that go through all the arithmetic with a key that is not allowed.
void test_refused_handshakes() {
    const std::vector<LinkPtr> links{open_link(), open_link()};
    const Members members = connect_all(links, "group");
    const auto other = Identity::open(diloco::link::make_key().first);
    for (int i = 0; i < 100; ++i) {
        Stranger stranger(links[0]->address());
        EXPECT(stranger.begin_tls(other) && stranger.is_closed());
    }
    for (int i = 0; i < 3000 && links[0]->counters().at("strangers") < 100; ++i) {
        std::this_thread::sleep_for(10ms);
    }
    EXPECT(links[0]->counters().at("strangers") == 100);
    EXPECT(links[0]->counters().at("open") == 2);
    expect_flow(members, 0, 1);
}

void test_arguments() {
    const LinkPtr own = open_link();
    const std::vector<LinkPtr> two{own, open_link()};
    const Places peers = places(two);
    Places wrong = peers;
    wrong[1].key.clear();
    EXPECT(says(error_of_connect(own, 0, wrong, 1s), "the key of rank 1 is missing"));
    wrong[1].key = "abc";
    EXPECT(says(error_of_connect(own, 0, wrong, 1s), "64 hexadecimal digits"));
    wrong = peers;
    wrong[0].key = peers[1].key;
    EXPECT(says(error_of_connect(own, 0, wrong, 1s), "this process (rank 0) has the key"));
    const LinkPtr plain = open_plain_link();
    wrong = places({plain, own});
    EXPECT(says(error_of_connect(plain, 0, wrong, 1s), "this link has no key, and rank 1 has"));
    std::string error;
    try {
        plain->allow({});
    } catch (const std::exception& failure) {
        error = failure.what();
    }
    EXPECT(says(error, "this link has no key"));
    const Members members = connect_all(two, "group");
    wrong = peers;
    wrong[1].key = peers[0].key;
    EXPECT(says(error_of_connect(own, 0, wrong, 1s), "has another key in another group"));
    expect_flow(members, 0, 1);
}

}  // namespace

int main() {
    is_keyed = true;
    strange_identity();
    test_not_allowed();
    test_refused_guest();
    test_wrong_key();
    test_claimed_nonce();
    test_removed();
    test_plain_and_keyed();
    test_slow_handshakes();
    test_refused_handshakes();
    test_arguments();
    return passed("keyed link");
}
