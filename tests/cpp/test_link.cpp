// The link over real sockets: messages, groups that change, peers that break, strangers.

#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>
#include <tuple>

#include "link_world.h"

using namespace diloco_test;
using namespace std::chrono_literals;
using diloco::link::Answer;
using diloco::link::Frame;
using diloco::link::FrameKind;
using diloco::link::Hello;
using diloco::link::kLinkVersion;
using diloco::link::Status;

namespace {

constexpr size_t kMiB = 1024 * 1024;

// ------------------------------------------------------------------------------------ messages

void test_sizes() {
    const Members members = connect_new(2, "sizes", 2);
    const size_t sizes[] = {0,     1,     1023,   1024,   1025,         65535,
                            65536, 65537, 262143, 262144, 5 * kMiB + 3, 262145};
    int tag = 0;
    for (const size_t size : sizes) {
        for (const int from : {0, 1}) {
            for (const bool sends_first : {false, true}) {
                const Member &sender = members[from], &receiver = members[1 - from];
                const int number = ++tag % 4;
                const Bytes sent = pattern(size, tag);
                Bytes received(size);
                Work send, recv;
                if (sends_first) send = sender.send(1 - from, tag, sent, number);
                if (sends_first) std::this_thread::sleep_for(2ms);
                recv = receiver.recv(from, tag, received, number);
                if (!sends_first) send = sender.send(1 - from, tag, sent, number);
                EXPECT(sender.wait(send) && receiver.wait(recv));
                EXPECT(sent == received);
            }
        }
    }
    EXPECT(members[0].count("dropped") == 0 && members[1].count("dropped") == 0);
}

// Messages find their receives by tag; those with the same tag keep their order.
void test_order() {
    const Members members = connect_new(2);
    constexpr int kNum = 300;
    std::vector<Bytes> sent, received;
    std::vector<Work> sends, recvs;
    for (int i = 0; i < kNum; ++i) {
        sent.push_back(pattern(static_cast<size_t>(i * 97 % 5000), i));
        received.emplace_back(sent.back().size());
    }
    for (int i = 0; i < kNum; ++i) sends.push_back(members[0].send(1, i, sent[i]));
    for (int i = kNum - 1; i >= 0; --i) recvs.push_back(members[1].recv(0, i, received[i]));
    for (const Work& recv : recvs) EXPECT(members[1].wait(recv));
    for (const Work& send : sends) EXPECT(members[0].wait(send));
    EXPECT(sent == received);

    for (const size_t size : {size_t{24}, size_t{70000}}) {
        std::vector<Bytes> out, in;
        for (int i = 0; i < 20; ++i) {
            out.push_back(pattern(size, 1000 + i));
            in.emplace_back(size);
        }
        std::vector<Work> works;
        for (int i = 0; i < 10; ++i) works.push_back(members[0].send(1, 7, out[i]));
        for (int i = 0; i < 20; ++i) works.push_back(members[1].recv(0, 7, in[i]));
        for (int i = 10; i < 20; ++i) works.push_back(members[0].send(1, 7, out[i]));
        for (const Work& work : works) EXPECT(members[0].wait(work));
        EXPECT(out == in);
    }
}

void test_three() {
    const Members members = connect_new(3, "three", 2);
    std::vector<Bytes> in(18);
    std::vector<Work> works;
    const auto payload = [](int from, int to, int lane) {
        return pattern(static_cast<size_t>(90000 + from), 100 * from + 10 * to + lane);
    };
    std::vector<Bytes> out;
    out.reserve(18);
    for (int from = 0; from < 3; ++from) {
        for (int to = 0; to < 3; ++to) {
            for (int lane = 0; lane < 2 && from != to; ++lane) {
                const size_t at = static_cast<size_t>(from * 6 + to * 2 + lane);
                out.push_back(payload(from, to, lane));
                in[at].resize(out.back().size());
                works.push_back(members[to].recv(from, 3, in[at], 2 * lane));
                works.push_back(members[from].send(to, 3, out.back(), 2 * lane));
            }
        }
    }
    for (const Work& work : works) EXPECT(members[0].wait(work));
    for (int from = 0; from < 3; ++from) {
        for (int to = 0; to < 3; ++to) {
            for (int lane = 0; lane < 2 && from != to; ++lane) {
                EXPECT(in[static_cast<size_t>(from * 6 + to * 2 + lane)] ==
                       payload(from, to, lane));
            }
        }
    }
}

// More receives than may be granted at once, and more small messages than the receiver keeps.
void test_many_early() {
    const Members members = connect_new(2);
    constexpr int kNum = 3000;
    for (const size_t size : {size_t{2000}, size_t{100}}) {
        std::vector<Bytes> out, in;
        for (int i = 0; i < kNum; ++i) {
            out.push_back(pattern(size, i));
            in.emplace_back(size);
        }
        std::vector<Work> works;
        const bool sends_first = size == 100;
        for (int i = 0; i < kNum && sends_first; ++i)
            works.push_back(members[0].send(1, i, out[i]));
        std::this_thread::sleep_for(50ms);
        if (sends_first) {
            const auto is_done = [](const Work& work) { return work.is_done(); };
            EXPECT(std::count_if(works.begin(), works.end(), is_done) <= 1024);
        }
        for (int i = 0; i < kNum; ++i) works.push_back(members[1].recv(0, i, in[i]));
        for (int i = 0; i < kNum && !sends_first; ++i)
            works.push_back(members[0].send(1, i, out[i]));
        for (const Work& work : works) EXPECT(members[0].wait(work));
        EXPECT(out == in);
    }
}

void test_sizes_that_differ() {
    const Members members = connect_new(2);
    Bytes small(100), medium(5000), large(6000);
    int tag = 0;
    const auto expect_both = [&](Bytes& sent, Bytes& received, bool sends_first) {
        ++tag;
        Work send, recv;
        if (sends_first) send = members[0].send(1, tag, sent);
        std::this_thread::sleep_for(5ms);
        recv = members[1].recv(0, tag, received);
        if (!sends_first) send = members[0].send(1, tag, sent);
        const auto out = std::to_string(sent.size()), in = std::to_string(received.size());
        const std::string at_receiver = members[1].error_of(recv);
        EXPECT(says(at_receiver, "expects " + in + " bytes") && says(at_receiver, "sends " + out));
        if (sent.size() <= 1024) return;  // a small message has been written
        const std::string at_sender = members[0].error_of(send);
        EXPECT(says(at_sender, "sends " + out + " bytes") && says(at_sender, "expects " + in));
    };
    for (const bool sends_first : {false, true}) {
        expect_both(medium, large, sends_first);
        expect_both(large, medium, sends_first);
        expect_both(small, medium, sends_first);
        expect_both(medium, small, sends_first);
    }
    // The groups go on.
    const Bytes sent = pattern(70000, 1);
    Bytes received(70000);
    const Work recv = members[1].recv(0, 0, received);
    EXPECT(members[0].wait(members[0].send(1, 0, sent)) && members[1].wait(recv));
    EXPECT(sent == received);
}

// A small message overtakes a large one.
void test_priority() {
    const Members members = connect_new(2);
    bool has_overtaken = false;
    // A busy machine may wake this thread late, when the bulk has arrived, too.
    const auto end = std::chrono::steady_clock::now() + kEnough;
    for (int i = 0; !has_overtaken && std::chrono::steady_clock::now() < end; ++i) {
        const Bytes bulk = pattern(32 * kMiB, i), word = pattern(24, i);
        Bytes bulk_in(bulk.size()), word_in(word.size());
        const Work recv_bulk = members[1].recv(0, 2 * i, bulk_in);
        const Work recv_word = members[1].recv(0, 2 * i + 1, word_in);
        const Work send_bulk = members[0].send(1, 2 * i, bulk);
        const Work send_word = members[0].send(1, 2 * i + 1, word);
        EXPECT(members[1].wait(recv_word));
        has_overtaken = !recv_bulk.is_done();
        EXPECT(members[1].wait(recv_bulk));
        EXPECT(members[0].wait(send_bulk) && members[0].wait(send_word));
        EXPECT(bulk == bulk_in && word == word_in);
    }
    EXPECT(has_overtaken);
}

// ------------------------------------------------------------------------- memory that vanishes

void test_timeout() {
    const Members members = connect_new(2);
    Mapping memory(kMiB);
    const Work recv = members[0].recv(1, 1, memory.data(), memory.size());
    EXPECT(says(members[0].error_of(recv, 20ms), "timed out after 20 ms"));
    memory.unmap();
    const Bytes sent(kMiB);
    // It has a grant, and so it travels, to nobody.
    EXPECT(members[1].wait(members[1].send(0, 1, sent)));
    Mapping other(kMiB);
    const Work send = members[1].send(0, 2, other.data(), other.size());
    EXPECT(says(members[1].error_of(send, 20ms), "timed out"));
    other.unmap();
    Bytes word(8);
    const Bytes word_out(8);
    const Work end = members[0].recv(1, 3, word);
    EXPECT(members[1].wait(members[1].send(0, 3, word_out)) && members[0].wait(end));
}

// Either side cancels while bytes travel; the memory is gone at once.
void test_cancel() {
    const Members members = connect_new(2);
    constexpr int kRounds = 60;
    for (int i = 0; i < kRounds; ++i) {
        Mapping out(8 * kMiB), in(8 * kMiB);
        const Work recv = members[1].recv(0, i, in.data(), in.size());
        const Work send = members[0].send(1, i, out.data(), out.size());
        std::this_thread::sleep_for(std::chrono::microseconds(i * 40));
        if (i % 2 == 0) {
            send.cancel();
            out.unmap();
            recv.cancel();
            in.unmap();
        } else {
            recv.cancel();
            in.unmap();
            send.cancel();
            out.unmap();
        }
        // A later message on the same connection is not disturbed.
        const Bytes sent = pattern(300000, i);
        Bytes received(sent.size());
        const Work later = members[1].recv(0, 1000 + i, received);
        EXPECT(members[0].wait(members[0].send(1, 1000 + i, sent)) && members[1].wait(later));
        EXPECT(sent == received);
    }
}

// Whole groups end while bytes travel.
void test_close_under_way() {
    std::vector<LinkPtr> links{open_link(), open_link()};
    for (int i = 0; i < 20; ++i) {
        Members members = connect_all(links, "epoch " + std::to_string(i), 2);
        std::vector<std::unique_ptr<Mapping>> out, in;
        std::vector<Work> works;
        for (int tag = 0; tag < 4; ++tag) {
            out.push_back(std::make_unique<Mapping>(4 * kMiB));
            in.push_back(std::make_unique<Mapping>(4 * kMiB));
            works.push_back(members[1].recv(0, tag, in.back()->data(), 4 * kMiB, tag));
            works.push_back(members[0].send(1, tag, out.back()->data(), 4 * kMiB, tag));
        }
        std::this_thread::sleep_for(std::chrono::microseconds(i * 200));
        const auto close = [&](int rank, std::vector<std::unique_ptr<Mapping>>& memory) {
            members[rank].close();
            for (auto& one : memory) one->unmap();
        };
        std::thread other([&] { close(1, in); });
        close(0, out);
        other.join();
        for (const Work& work : works) EXPECT(work.is_done());
    }
    EXPECT(links[0]->counters().at("connects") == 4);
}

// -------------------------------------------------------------------------------- groups change

void test_connections_stay() {
    std::vector<LinkPtr> links{open_link(), open_link(), open_link()};
    const std::vector<LinkPtr> two(links.begin(), links.begin() + 2);
    Members members = connect_all(two, "one", 2);
    EXPECT(links[0]->counters().at("connects") == 4);  // two lanes, dialled from both sides
    members = connect_all(two, "two", 2);
    EXPECT(links[0]->counters().at("connects") == 4);
    members = connect_all(links, "three", 2);
    EXPECT(links[0]->counters().at("connects") == 8);
    EXPECT(links[2]->counters().at("connects") == 8);
    EXPECT(links[0]->counters().at("open") == 8);
    const Bytes sent = pattern(100000, 5);
    Bytes received(sent.size());
    const Work recv = members[2].recv(0, 1, received);
    EXPECT(members[0].wait(members[0].send(2, 1, sent)) && members[2].wait(recv));
    EXPECT(sent == received);
}

// A call of connect() that misses news sleeps until its next look, which is far away here; where
// calls could miss news, 10 to 100 of these did.
void test_news_is_not_missed() {
    const Link::Limits limits{60s, 5s, 30s, 10s};
    const std::vector<LinkPtr> links{open_link(kAnyPort, kAnyPort, limits),
                                     open_link(kAnyPort, kAnyPort, limits)};
    const Places peers = places(links);
    allow_all(links);
    std::atomic<bool> is_slow = false;
    std::array<std::vector<Member>, 2> members;
    const auto connect = [&](size_t rank) {
        for (int i = 0; i < 4000 && !is_slow; ++i) {
            const auto begin = std::chrono::steady_clock::now();
            members[rank].emplace_back(links[rank], 1);
            members[rank].back().connect(std::to_string(i), static_cast<int>(rank), peers);
            // The first call dials, and waits for more than news.
            if (i > 0 && std::chrono::steady_clock::now() - begin > 8s) is_slow = true;
        }
    };
    std::thread other(connect, 1);
    connect(0);
    other.join();
    EXPECT(!is_slow);
}

// An older group's messages do not reach the receives of a newer one.
void test_epochs_are_apart() {
    std::vector<LinkPtr> links{open_link(), open_link()};
    Members old = connect_all(links, "old");
    const Bytes old_word = pattern(24, 1), old_bulk = pattern(50000, 2);
    const Work early = old[0].send(1, 5, old_word);
    const Work never = old[0].send(1, 6, old_bulk);
    EXPECT(old[0].wait(early));
    Members fresh = connect_all(links, "new");
    Bytes word(24), bulk(50000);
    const Work recv_word = fresh[1].recv(0, 5, word);
    const Work recv_bulk = fresh[1].recv(0, 6, bulk);
    EXPECT(says(fresh[1].error_of(recv_word, 50ms), "timed out"));
    EXPECT(!recv_bulk.is_done());
    old[0].close();
    EXPECT(says(old[0].error_of(never), "the group was closed"));
    EXPECT(says(old[1].error_of(old[1].recv(0, 6, bulk)), "connection closed by peer"));
    // It came before the end.
    EXPECT(old[1].wait(old[1].recv(0, 5, word)) && word == old_word);
    const Bytes sent = pattern(50000, 3);
    EXPECT(fresh[0].wait(fresh[0].send(1, 6, sent)) && fresh[1].wait(recv_bulk) && bulk == sent);
}

// -------------------------------------------------------------------------------- peers break

Frame frame_of(FrameKind kind, uint64_t token) {
    Frame frame;
    frame.kind = static_cast<uint8_t>(kind);
    frame.token = token;
    return frame;
}

void test_peer_closes() {
    Members members = connect_new(3);
    Bytes bulk(4 * kMiB), word(24), other_word(24);
    const Bytes out(4 * kMiB), word_out(24);
    const Work recv_bulk = members[0].recv(1, 1, bulk);
    const Work recv_word = members[0].recv(1, 2, word);
    const Work send_bulk = members[0].send(1, 3, out);
    const Work other = members[0].recv(2, 1, other_word);
    const LinkPtr gone = members[1].link;
    members[1].close();
    gone->close();
    for (const Work& work : {recv_bulk, recv_word, send_bulk}) {
        const std::string error = members[0].error_of(work);
        EXPECT(says(error, "connection closed by peer") && says(error, "rank 1"));
    }
    // Later works fail at once, and works with other peers are not touched.
    EXPECT(says(members[0].error_of(members[0].send(1, 4, word_out)), "connection closed by peer"));
    EXPECT(!other.is_done());
    EXPECT(members[2].wait(members[2].send(0, 1, word_out)) && members[0].wait(other));
}

// A process without a group that goes away is noticed, too, and the next group dials anew.
void test_connection_breaks() {
    std::vector<LinkPtr> links{open_link(), open_link()};
    Members members = connect_all(links, "one");
    Bytes bulk(kMiB);
    const Work recv = members[0].recv(1, 1, bulk);
    links[1]->close();
    EXPECT(says(members[0].error_of(recv), "connection closed by peer"));
    links[1] = open_link();
    members = connect_all(links, "two");
    const Work again = members[0].recv(1, 1, bulk);
    const Bytes sent = pattern(kMiB, 1);
    EXPECT(members[1].wait(members[1].send(0, 1, sent)) && members[0].wait(again));
    EXPECT(bulk == sent);
}

void test_link_closes_with_groups() {
    Members members = connect_new(2);
    Mapping memory(kMiB);
    const Work recv = members[0].recv(1, 1, memory.data(), memory.size());
    members[0].link->close();
    memory.unmap();
    EXPECT(says(members[0].error_of(recv), "the link was closed"));
    Bytes word(8);
    EXPECT(says(members[0].error_of(members[0].send(1, 1, word)), "the link was closed"));
    EXPECT(says(error_of_connect(members[0].link, 0, places({members[0].link}), 1s), "closed"));
}

// The last words of a process arrive, whatever it has not read.
void test_last_words() {
    for (int i = 0; i < 20; ++i) {
        Members members = connect_new(2);
        Bytes word = pattern(120, i), in(120);
        const Work recv = members[1].recv(0, 1, in);
        std::vector<Work> unread;
        for (int tag = 0; tag < 50; ++tag) unread.push_back(members[1].send(0, tag, word));
        EXPECT(members[0].wait(members[0].send(1, 1, word)));
        members[0].close();
        members[0].link->close();
        EXPECT(members[1].wait(recv) && in == word);
    }
}

// A peer that can be killed: the kernel of a killed process resets the connections on which unread
// bytes wait.
class Killed {
  public:
    // With an address the link dials the peer as well, and sends over the connection that it dials.
    Killed(const LinkPtr& link, bool has_address) : member(link, 1), to_link_(link->address()) {
        std::string address;
        std::tie(listener_, address) = listen_on_loopback();
        Places peers = places({link});
        peers.push_back({std::string(32, '5'), has_address ? address : ""});
        std::thread connecting([&] { member.connect("group", 0, peers); });
        if (has_address) answer_dial();
        EXPECT(to_link_.greet(link->nonce()).status == static_cast<uint32_t>(Status::kWelcome));
        token_ = token_of_join([&](void* data, size_t size) {
            if (!has_address) return to_link_.read(data, size);
            return recv(from_link_, data, size, MSG_WAITALL) == static_cast<ssize_t>(size);
        });
        Frame answer = frame_of(FrameKind::kJoin, token_);
        answer.total = 1;
        EXPECT(to_link_.write(answer));
        connecting.join();
    }
    ~Killed() {
        close(listener_);
        if (from_link_ >= 0) reset_socket(from_link_);
    }

    void say(int tag, const Bytes& word) {
        Frame frame = frame_of(FrameKind::kEager, token_);
        frame.tag = static_cast<uint32_t>(tag);
        frame.length = static_cast<uint32_t>(word.size());
        frame.total = frame.length;
        Bytes bytes(sizeof(frame));
        std::memcpy(bytes.data(), &frame, sizeof(frame));
        bytes.insert(bytes.end(), word.begin(), word.end());
        EXPECT(to_link_.write(bytes.data(), bytes.size()));
    }
    void reset_dialled() { reset_socket(std::exchange(from_link_, -1)); }
    void reset_own() { to_link_.reset(); }

    Member member;

  private:
    void answer_dial() {
        from_link_ = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
        Hello hello;
        EXPECT(recv(from_link_, &hello, sizeof(hello), MSG_WAITALL) == sizeof(hello));
        Answer answer;
        answer.status = static_cast<uint32_t>(Status::kWelcome);
        answer.own = hello.wanted;
        EXPECT(send(from_link_, &answer, sizeof(answer), 0) == sizeof(answer));
    }

    Stranger to_link_;
    int listener_ = -1, from_link_ = -1;
    uint64_t token_ = 0;
};

// The messages that a killed process has sent arrive, whatever that process had not read.
void test_killed_peer() {
    if (is_keyed) return;  // test_tls.cpp cuts sessions
    const Bytes word = pattern(24, 3);
    {
        Killed peer(open_link(), true);
        Bytes in(24);
        const Work recv = peer.member.recv(1, 1, in);
        peer.reset_dialled();
        std::this_thread::sleep_for(100ms);
        peer.say(1, word);
        EXPECT(peer.member.wait(recv) && in == word);
    }
    for (int i = 0; i < 50; ++i) {
        Killed peer(open_link(), false);
        Bytes in(24);
        const Work recv = peer.member.recv(1, 1, in);
        const Work never = peer.member.recv(1, 2, in);
        std::thread killing([&] {
            peer.say(1, word);
            peer.reset_own();
        });
        while (!never.is_done()) {
            peer.member.send(1, 3, word);
            std::this_thread::sleep_for(20us);
        }
        killing.join();
        EXPECT(peer.member.wait(recv) && in == word);
        EXPECT(says(peer.member.error_of(never), "connection closed by peer: rank 1"));
    }
}

// ----------------------------------------------------------------------------------- addresses

void test_no_address() {
    std::vector<LinkPtr> links{open_link(), open_link("", "")};
    EXPECT(links[1]->address().empty());
    Members members = connect_all(links, "nat", 2);
    EXPECT(links[0]->counters().at("open") == 2);
    const Bytes sent = pattern(400000, 1);
    for (const int from : {0, 1}) {
        Bytes received(sent.size());
        const Work recv = members[1 - from].recv(from, 1, received, 2);
        EXPECT(members[from].wait(members[from].send(1 - from, 1, sent, 2)));
        EXPECT(members[1 - from].wait(recv) && received == sent);
    }
    const std::vector<LinkPtr> none{open_link("", ""), open_link("", "")};
    const std::string error = error_of_connect(none[0], 0, places(none), 60s);
    EXPECT(says(error, "rank 0") && says(error, "rank 1") && says(error, "no address"));
}

// A peer whose address refuses: its own connection carries both directions.
void test_refused_address() {
    const std::string gone = open_link()->address();
    std::vector<LinkPtr> links{open_link(), open_link(kAnyPort, gone)};
    Members members = connect_all(links, "one way");
    EXPECT(links[0]->counters().at("open") == 1);
    Bytes word = pattern(24, 1), in(24);
    const Work recv = members[1].recv(0, 1, in);
    EXPECT(members[0].wait(members[0].send(1, 1, word)) && members[1].wait(recv) && in == word);
}

// The sentence with which rank 0 fails to connect.
std::string slow_error(const LinkPtr& link, const Places& peers, const std::string& part) {
    std::string error;
    call_twice(300ms, [&](milliseconds limit) {
        const std::string token = "slow " + std::to_string(limit.count());
        error = error_of_connect(link, 0, peers, limit, 1, token);
        return error.find(part) != std::string::npos;
    });
    return error;
}

void test_other_process() {
    const LinkPtr own = open_link();
    Places peers = places({own, open_link()});
    EXPECT(says(error_of_connect(own, 0, peers, 300ms), "rank 1 at " + peers[1].address));
    const LinkPtr other = open_link();
    peers[1].address = other->address();
    allow_all({own, other});
    const std::string part = is_keyed ? "the process there has the key" : "another process listens";
    const std::string error = slow_error(own, peers, part);
    EXPECT(says(error, "rank 1") && says(error, part));
    EXPECT(other->counters().at("strangers") > 0 && other->counters().at("open") == 0);
}

// It is connected, and does not come; the sentence names it alone.
void test_who_does_not_come() {
    std::vector<LinkPtr> links{open_link(), open_link(), open_link()};
    std::vector<std::thread> threads;
    std::vector<std::string> errors(2);
    allow_all(links);
    for (int rank : {0, 1}) {
        threads.emplace_back(
            [&, rank] { errors[rank] = error_of_connect(links[rank], rank, places(links), 2s); });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& error : errors) EXPECT(says(error, "rank 2"));
    const bool are_both_named = errors[0].find("rank 1") != std::string::npos &&
                                errors[1].find("rank 0") != std::string::npos;
    EXPECT(!are_both_named);
}

// The kernel of a stopped process answers for it.
void test_stopped_peer() {
    const auto [silent, address] = listen_on_loopback();
    const LinkPtr own = open_link();
    auto peers = places({own, open_link()});
    peers[1].address = address;
    const auto begin = std::chrono::steady_clock::now();
    const std::string part = "does not answer, and may be stopped";
    EXPECT(says(slow_error(own, peers, part), part));
    EXPECT(std::chrono::steady_clock::now() - begin < 30s);
    close(silent);
}

void test_arguments() {
    const LinkPtr own = open_link();
    const auto peers = places({own, open_link()});
    EXPECT(says(error_of_connect(own, 1, peers, 1s), "is not this process"));
    EXPECT(says(error_of_connect(own, 0, places({own, own}), 1s), "same process"));
    EXPECT(says(error_of_connect(own, 0, peers, 1s, 0), "got 0"));
    auto wrong = peers;
    wrong[1].address = "nowhere";
    EXPECT(says(error_of_connect(own, 0, wrong, 1s), "host:port"));
    wrong = peers;
    wrong[1].nonce = "xyz";
    EXPECT(says(error_of_connect(own, 0, wrong, 1s), "32 hexadecimal digits"));
    std::string error;
    try {
        Link::open(own->address(), own->address());
    } catch (const std::exception& failure) {
        error = failure.what();
    }
    EXPECT(says(error, "cannot listen at " + own->address()));
}

void test_lanes_differ() {
    std::vector<LinkPtr> links{open_link(), open_link()};
    allow_all(links);
    std::string error;
    std::thread other([&] { error = error_of_connect(links[1], 1, places(links), 5s, 3); });
    const std::string own = error_of_connect(links[0], 0, places(links), 5s, 2);
    other.join();
    EXPECT(says(own + error, " lanes, and rank "));
}

// ----------------------------------------------------------------------------------- strangers

// Until the link has closed what it shall close.
void wait_for_descriptors(int expected) {
    for (int i = 0; i < 3000 && num_descriptors() != expected; ++i) {
        std::this_thread::sleep_for(10ms);
    }
    EXPECT(num_descriptors() == expected);
}

void test_strangers() {
    const LinkPtr link = open_link(kAnyPort, kAnyPort, {60s, 300ms});
    const int before = num_descriptors();
    for (int i = 0; i < 2000; ++i) Stranger stranger(link->address());
    {
        Stranger garbage(link->address());
        EXPECT(garbage.write("GET / HTTP/1.1\r\n", 16) && garbage.is_closed());
        // The first wrong byte, long before a greeting is complete.
        Stranger nearly(link->address());
        EXPECT(nearly.write("DILOx", 5) && nearly.is_closed());
        Stranger silent(link->address()), slow(link->address());
        EXPECT(slow.write("DILOL", 5));
        EXPECT(silent.is_closed() && slow.is_closed());
    }
    for (int i = 0; i < 3000 && link->counters().at("strangers") < 2004; ++i) {
        std::this_thread::sleep_for(10ms);
    }
    EXPECT(link->counters().at("strangers") == 2004);
    wait_for_descriptors(before);
    EXPECT(link->counters().at("open") == 0);
}

bool is_welcome(Stranger& stranger, const LinkPtr& link, const char* own) {
    return stranger.greet(link->nonce(), kLinkVersion, std::string(32, own[0])).status ==
           static_cast<uint32_t>(Status::kWelcome);
}

void test_who_has_to_go() {
    diloco::link::Strangers strangers;
    EXPECT(strangers.choose() == 0);
    for (const uint64_t id : {1, 2}) strangers.add(id, "quiet");
    for (const uint64_t id : {3, 4, 5}) strangers.add(id, "busy");
    EXPECT(strangers.hear(3) && !strangers.hear(3) && !strangers.hear(6));
    // The oldest silent one of the busiest host, and then all others of that host as well.
    EXPECT(strangers.choose() == 4);
    strangers.remove(4);
    // Both hosts have two, and the silent one of the other host is older.
    EXPECT(strangers.choose() == 1);
    for (const uint64_t id : {1, 2}) strangers.hear(id);
    EXPECT(strangers.choose() == 5);
    strangers.hear(5);
    EXPECT(strangers.choose() == 1);
    strangers.remove(1);
    EXPECT(strangers.choose() == 3 && strangers.oldest() == 2 && strangers.size() == 3);
}

// Far more silent connections of one host than a link keeps: whoever speaks comes in.
void test_silent_strangers() {
    constexpr char kBusy[] = "127.0.0.9";
    const LinkPtr link = open_link(kAnyPort, kAnyPort, {60s, 60s});
    Stranger early(link->address(), kBusy);
    if (is_keyed) EXPECT(early.begin_tls());
    const Hello hello = Stranger::hello(link->nonce(), kLinkVersion, std::string(32, '3'));
    constexpr size_t kFirst = 8;
    EXPECT(early.write(&hello, kFirst));
    std::vector<std::unique_ptr<Stranger>> silent;
    for (int i = 0; i < 2000; ++i) {
        silent.push_back(std::make_unique<Stranger>(link->address(), kBusy));
    }
    Stranger other(link->address()), same(link->address(), kBusy);
    EXPECT(is_welcome(other, link, "1") && is_welcome(same, link, "2"));
    // The oldest ones are closed, and none of those that have spoken.
    for (size_t i = 0; i < 1000; ++i) EXPECT(silent[i]->is_closed());
    EXPECT(early.write(reinterpret_cast<const uint8_t*>(&hello) + kFirst, sizeof(hello) - kFirst));
    EXPECT(early.answer().status == static_cast<uint32_t>(Status::kWelcome));
    EXPECT(link->counters().at("open") == 3);
}

// More connections than the process may have: a silent one goes for each that comes.
void test_no_descriptors_left() {
    const LinkPtr link = open_link(kAnyPort, kAnyPort, {60s, 60s});
    std::vector<Stranger> silent(100);
    Stranger late;
    rlimit former{};
    EXPECT(getrlimit(RLIMIT_NOFILE, &former) == 0);
    rlimit tight = former;
    tight.rlim_cur = static_cast<rlim_t>(num_descriptors());
    EXPECT(setrlimit(RLIMIT_NOFILE, &tight) == 0);
    std::vector<int> fds;
    while (true) {
        const int fd = dup(0);
        if (fd < 0) break;
        fds.push_back(fd);
    }
    for (Stranger& stranger : silent) stranger.connect(link->address());
    late.connect(link->address());
    EXPECT(is_welcome(late, link, "1"));
    EXPECT(silent[0].is_closed());
    for (const int fd : fds) close(fd);
    EXPECT(setrlimit(RLIMIT_NOFILE, &former) == 0);
}

void test_greetings() {
    const LinkPtr link = open_link();
    Stranger wrong(link->address());
    const std::string nonce(32, '0');
    EXPECT(wrong.greet(nonce).status == static_cast<uint32_t>(Status::kOtherProcess));
    EXPECT(wrong.is_closed());
    Stranger newer(link->address());
    EXPECT(newer.greet(link->nonce(), kLinkVersion + 1).status ==
           static_cast<uint32_t>(Status::kOtherVersion));
    EXPECT(newer.is_closed());
    Stranger sound(link->address());
    EXPECT(sound.greet(link->nonce()).status == static_cast<uint32_t>(Status::kWelcome));
    EXPECT(sound.write("no frame, but forty bytes that look like", 40) && sound.is_closed());
}

// A peer cannot make this process keep more than it has promised.
void test_greedy_peer() {
    const LinkPtr link = open_link();
    {
        Stranger greedy(link->address());
        greedy.greet(link->nonce());
        for (int i = 0; i < 1025; ++i) {
            if (!greedy.write(frame_of(FrameKind::kEager, 1))) break;
        }
        EXPECT(greedy.is_closed());
    }
    {
        Stranger greedy(link->address());
        greedy.greet(link->nonce());
        for (int i = 0; i < 1025; ++i) {
            if (!greedy.write(frame_of(FrameKind::kGrant, 1))) break;
        }
        EXPECT(greedy.is_closed());
    }
    {
        Stranger large(link->address());
        large.greet(link->nonce());
        Frame frame = frame_of(FrameKind::kData, 1);
        frame.length = 256 * 1024 + 1;
        EXPECT(large.write(frame) && large.is_closed());
    }
    // Groups that never come: the oldest are dropped.
    Stranger many(link->address());
    many.greet(link->nonce());
    for (uint64_t token = 1; token <= 40; ++token) {
        EXPECT(many.write(frame_of(FrameKind::kJoin, token)));
    }
    for (int i = 0; i < 1000 && link->counters().at("dropped") < 24; ++i) {
        std::this_thread::sleep_for(5ms);
    }
    EXPECT(link->counters().at("dropped") == 24);
}

// Connections and early frames of nobody's group end after the grace.
void test_grace() {
    const LinkPtr link = open_link(kAnyPort, kAnyPort, {300ms, 5s});
    Stranger idle(link->address());
    idle.greet(link->nonce());
    EXPECT(idle.write(frame_of(FrameKind::kJoin, 1)));
    EXPECT(idle.is_closed());
    EXPECT(link->counters().at("open") == 0);
}

// -------------------------------------------------------------------------------------- forking

void test_fork() {
    Members members = connect_new(2);
    Bytes word(8);
    const Work recv = members[0].recv(1, 1, word);
    const auto num_sockets = [] {
        int count = 0;
        for (int fd = 0; fd < 256; ++fd) {
            int type = 0;
            socklen_t length = sizeof(type);
            count += getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) == 0 ? 1 : 0;
        }
        return count;
    };
    EXPECT(num_sockets() == 6);
    const pid_t child = fork();
    if (child == 0) {
        bool is_sound = num_sockets() == 0 && !members[0].link->is_own_process();
        try {
            members[0].link->counters();
            is_sound = false;
        } catch (const std::exception& error) {
            is_sound = is_sound && says(error.what(), "open a link of its own");
        }
        recv.cancel();
        members[0].link.reset();
        _exit(is_sound ? 0 : 1);
    }
    int status = 1;
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    const Bytes sent(8);
    EXPECT(members[1].wait(members[1].send(0, 1, sent)) && members[0].wait(recv));
}

void test_all() {
    test_sizes();
    test_order();
    test_three();
    test_many_early();
    test_sizes_that_differ();
    test_priority();
    test_timeout();
    test_cancel();
    test_close_under_way();
    test_connections_stay();
    test_news_is_not_missed();
    test_epochs_are_apart();
    test_peer_closes();
    test_connection_breaks();
    test_link_closes_with_groups();
    test_last_words();
    test_killed_peer();
    test_no_address();
    test_refused_address();
    test_other_process();
    test_who_does_not_come();
    test_stopped_peer();
    test_arguments();
    test_lanes_differ();
    test_strangers();
    test_who_has_to_go();
    test_silent_strangers();
    test_no_descriptors_left();
    test_greetings();
    test_greedy_peer();
    test_grace();
    test_fork();
}

}  // namespace

int main() {
    test_all();
    is_keyed = true;
    strange_identity();
    test_all();
    return passed("link");
}
