// Requests and answers outside of groups, and their place below the messages of rounds.
#include <condition_variable>
#include <map>
#include <mutex>

#include "link_world.h"

using namespace diloco_test;
using namespace std::chrono_literals;
using diloco::link::Body;
using diloco::link::CopyShare;
using diloco::link::Frame;
using diloco::link::FrameKind;
using diloco::link::Reply;
using diloco::link::Request;
using diloco::link::Status;
using Time = diloco::link::Clock::time_point;

namespace {

constexpr char kName[] = "copies";
constexpr uint64_t kMost = 64 << 20;

// Answers each request, whose first eight bytes are a size, with so many bytes; once it may.
class Echo : public diloco::link::Responder {
  public:
    explicit Echo(bool is_held = false) : is_held_(is_held) {
        thread_ = std::thread([this] { run(); });
    }
    ~Echo() override {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            is_over_ = true;
            changed_.notify_all();
        }
        thread_.join();
    }
    bool take(Request request) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        requests_.push_back(std::move(request));
        changed_.notify_all();
        return true;
    }
    void release() {
        const std::lock_guard<std::mutex> lock(mutex_);
        is_held_ = false;
        changed_.notify_all();
    }
    size_t num_held() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return requests_.size();
    }

  private:
    void run() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            changed_.wait(lock, [&] { return is_over_ || (!is_held_ && !requests_.empty()); });
            if (is_over_) return;
            const Request request = std::move(requests_.front());
            requests_.pop_front();
            lock.unlock();
            uint64_t size = 0;
            std::memcpy(&size, request.bytes.data(), sizeof(size));
            const auto bytes = std::make_shared<Bytes>(pattern(size, static_cast<int>(size)));
            request.answer(request.bytes, {bytes, bytes->data(), bytes->size()});
            lock.lock();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Request> requests_;
    bool is_held_, is_over_ = false;
    std::thread thread_;
};

Bytes request_of(uint64_t size) {
    Bytes bytes(16, 9);
    std::memcpy(bytes.data(), &size, sizeof(size));
    return bytes;
}

Place place_of(const LinkPtr& link) { return places({link}).front(); }

void connect_to(const LinkPtr& link, const LinkPtr& peer, const char* name = kName) {
    const auto end = std::chrono::steady_clock::now() + kEnough;
    while (!link->reach(name, {place_of(peer)}).front().empty()) {
        EXPECT(std::chrono::steady_clock::now() < end);
        std::this_thread::sleep_for(5ms);
    }
}

std::map<uint32_t, Reply> all_replies(const LinkPtr& link, size_t count) {
    std::map<uint32_t, Reply> found;
    const auto end = std::chrono::steady_clock::now() + kEnough;
    while (found.size() < count) {
        EXPECT(std::chrono::steady_clock::now() < end);
        for (Reply& reply : link->replies(kName, 100ms)) {
            EXPECT(found.count(reply.ticket) == 0);
            found[reply.ticket] = std::move(reply);
        }
    }
    return found;
}

bool is_answer(const Reply& reply, uint64_t size) {
    return reply.head == request_of(size) && reply.body.num_bytes == size &&
           Bytes(reply.body.data, reply.body.data + size) == pattern(size, static_cast<int>(size));
}

// Two links; the first asks the second.
struct Pair {
    LinkPtr asker = open_link(), server = open_link();
    std::shared_ptr<Echo> echo;

    explicit Pair(bool is_held = false) : echo(std::make_shared<Echo>(is_held)) {
        allow_all({asker, server});
        server->set_responder(kName, echo);
        connect_to(asker, server);
    }
    uint32_t ask(uint64_t size, uint64_t most = kMost) const {
        return asker->request(place_of(server), kName, request_of(size), most);
    }
};

void test_sizes() {
    const Pair pair;
    std::map<uint32_t, uint64_t> sizes;
    for (const uint64_t size : {0, 1, 4095, 65536, 65537, 200'000, 5'000'000}) {
        sizes[pair.ask(size)] = size;
    }
    const auto replies = all_replies(pair.asker, sizes.size());
    for (const auto& [ticket, size] : sizes) EXPECT(is_answer(replies.at(ticket), size));
}

void test_names_are_apart() {
    const Pair pair;
    EXPECT(pair.ask(100) != 0);
    EXPECT(pair.asker->request(place_of(pair.server), "another", request_of(5), kMost) != 0);
    EXPECT(is_answer(all_replies(pair.asker, 1).begin()->second, 100));
    // Nobody answers to that name.
    std::vector<Reply> others;
    while (others.empty()) others = pair.asker->replies("another", 1s);
    EXPECT(others.size() == 1 && others[0].head.empty() && others[0].body.num_bytes == 0);
}

void test_without_a_connection() {
    const LinkPtr asker = open_link(), server = open_link();
    allow_all({asker, server});
    EXPECT(asker->request(place_of(server), kName, request_of(1), 1) == 0);
    Place nowhere = place_of(server);
    nowhere.address = "";
    EXPECT(says(asker->reach(kName, {nowhere}).front(), "no address that others can dial"));
    const auto [fd, refusing] = listen_on_loopback();
    ::close(fd);
    nowhere.address = refusing;
    const auto end = std::chrono::steady_clock::now() + kEnough;
    std::string why;
    while (why.find("refused") == std::string::npos) {
        EXPECT(std::chrono::steady_clock::now() < end);
        why = asker->reach(kName, {nowhere}).front();
        std::this_thread::sleep_for(5ms);
    }
    // Nobody is dialled any more.
    EXPECT(asker->reach(kName, {}).empty());
}

// A process that nobody can dial dials the process that wants to ask.
void test_the_server_dials() {
    const LinkPtr asker = open_link(), server = open_link("", "");
    allow_all({asker, server});
    const auto echo = std::make_shared<Echo>();
    server->set_responder(kName, echo);
    connect_to(server, asker);
    const auto end = std::chrono::steady_clock::now() + kEnough;
    while (asker->request(place_of(server), kName, request_of(70000), kMost) == 0) {
        EXPECT(std::chrono::steady_clock::now() < end);
        std::this_thread::sleep_for(5ms);
    }
    EXPECT(is_answer(all_replies(asker, 1).begin()->second, 70000));
}

// The connection goes on into a group, and after the group's end.
void test_a_connection_for_groups_too() {
    Pair pair;
    EXPECT(pair.ask(3'000'000) != 0);
    const int64_t before = pair.asker->counters().at("connects");
    {
        const Members members = connect_all({pair.asker, pair.server}, "joined");
        const Bytes sent = pattern(2'000'000, 3);
        Bytes received(sent.size());
        const Work recv = members[1].recv(0, 1, received);
        EXPECT(members[0].wait(members[0].send(1, 1, sent)) && members[1].wait(recv));
        EXPECT(sent == received);
    }
    EXPECT(is_answer(all_replies(pair.asker, 1).begin()->second, 3'000'000));
    EXPECT(pair.ask(10) != 0 && is_answer(all_replies(pair.asker, 1).begin()->second, 10));
    // The peer may have dialled for the group, and nothing was dialled twice.
    EXPECT(pair.asker->counters().at("connects") <= before + 1);
}

void test_a_server_that_ends() {
    Pair pair(true);
    const uint32_t first = pair.ask(10), second = pair.ask(20);
    while (pair.echo->num_held() < 2) std::this_thread::sleep_for(1ms);
    pair.server->close();
    const auto replies = all_replies(pair.asker, 2);
    EXPECT(replies.at(first).head.empty() && replies.at(second).head.empty());
    // An answer for a connection that has ended goes nowhere.
    pair.echo->release();
    EXPECT(pair.ask(1) == 0);
}

void test_what_is_forgotten() {
    Pair pair(true);
    const uint32_t first = pair.ask(1'000'000), second = pair.ask(20);
    pair.asker->forget({first});
    pair.echo->release();
    const auto replies = all_replies(pair.asker, 1);
    EXPECT(replies.count(second) == 1 && is_answer(replies.at(second), 20));
}

void test_a_body_that_is_too_large() {
    Pair pair;
    EXPECT(pair.ask(1001, 1000) != 0);
    EXPECT(all_replies(pair.asker, 1).begin()->second.head.empty());
    connect_to(pair.asker, pair.server);
    EXPECT(pair.ask(1000, 1000) != 0);
    EXPECT(is_answer(all_replies(pair.asker, 1).begin()->second, 1000));
}

void test_too_many_requests() {
    Pair pair(true);
    for (size_t i = 0; i <= diloco::link::kMostRequests; ++i) pair.ask(i);
    const auto replies = all_replies(pair.asker, diloco::link::kMostRequests + 1);
    for (const auto& [ticket, reply] : replies) EXPECT(reply.head.empty());
    EXPECT(pair.echo->num_held() == diloco::link::kMostRequests);
}

// Frames of a peer that has asked nothing, and was asked nothing.
void test_frames_that_nobody_wants() {
    const LinkPtr link = open_link();
    allow_all({link});
    const auto is_cut = [&](const Frame& frame) {
        Stranger stranger(link->address());
        EXPECT(stranger.greet(link->nonce()).status == static_cast<uint32_t>(Status::kWelcome));
        EXPECT(stranger.write(frame));
        const Bytes zeros(frame.length);
        stranger.write(zeros.data(), zeros.size());
        Frame ping;
        ping.kind = static_cast<uint8_t>(FrameKind::kPing);
        stranger.write(ping);
        Frame heard;
        return !stranger.read(&heard, sizeof(heard));
    };
    Frame frame;
    frame.kind = static_cast<uint8_t>(FrameKind::kAnswer);
    frame.ticket = 1;
    frame.length = 40;
    EXPECT(!is_cut(frame));
    frame.length = 65;
    EXPECT(is_cut(frame));
    frame.kind = static_cast<uint8_t>(FrameKind::kCopy);
    EXPECT(!is_cut(frame));
    frame.length = 0;
    EXPECT(is_cut(frame));
    frame.length = diloco::link::kFragmentBytes + 1;
    EXPECT(is_cut(frame));
}

// --------------------------------------------------------------------------- rounds come first

void test_share() {
    constexpr uint64_t kPart = diloco::link::kCopyBytes;
    CopyShare share;
    Time now{1h};
    EXPECT(share.is_open(false, now) && share.is_open(true, now));
    // While rounds send, copies have a twentieth of all bytes.
    uint64_t rounds = 0, copies = 0;
    for (int i = 0; i < 10000; ++i, now += 1ms) {
        share.count_round(100'000, true, now);
        rounds += 100'000;
        if (share.is_open(true, now)) {
            share.count_copies(kPart);
            copies += kPart;
        }
    }
    const double part = static_cast<double>(copies) / static_cast<double>(rounds + copies);
    EXPECT(part > 0.049 && part < 0.051);
    share.count_copies(kPart);
    share.count_copies(kPart);
    EXPECT(!share.is_open(true, now + 400ms) && share.is_open(false, now + 400ms));
    // A peer that reads nothing holds no copy up.
    EXPECT(!share.is_open(true, now + 400ms) && share.is_open(true, now + 600ms));
    // A share that no copy wanted at its time is gone.
    now += 1h;
    share.count_round(kMost, false, now);
    share.count_copies(kPart);
    EXPECT(!share.is_open(true, now));
    share.count_round(10'000'000, true, now);
    EXPECT(share.is_open(true, now));
    // Copies that have had enough beside no round wait for the end of the next one; not for ever.
    EXPECT(share.is_open(false, now));
    share.count_copies(kMost);
    share.count_round(10'000'000, true, now);
    EXPECT(!share.is_open(true, now) && share.is_open(false, now));
    share.count_round(20'000'000, true, now);
    EXPECT(share.is_open(true, now));
}

// Copies go on beside rounds that never end, and rounds have most of the bytes.
void test_rounds_come_first() {
    const LinkPtr asker = open_link(), server = open_link(), peer = open_link();
    Members members = connect_all({server, peer}, "rounds");
    allow_all({asker, server, peer});
    const auto echo = std::make_shared<Echo>();
    server->set_responder(kName, echo);
    connect_to(asker, server);
    const Bytes sent(4 << 20, 1);
    std::vector<Bytes> received(4, Bytes(sent.size()));
    std::deque<std::pair<Work, Work>> works;
    int num_posted = 0;
    const auto post = [&] {
        Bytes& to = received[static_cast<size_t>(num_posted) % received.size()];
        const int tag = ++num_posted;
        works.emplace_back(members[1].recv(0, tag, to), members[0].send(1, tag, sent));
    };
    post();
    post();
    constexpr uint64_t kCopy = 2 << 20;
    EXPECT(asker->request(place_of(server), kName, request_of(kCopy), kMost) != 0);
    std::vector<Reply> replies;
    while (replies.empty()) {
        // Another message waits before the first one ends: the round never pauses.
        post();
        EXPECT(members[0].wait(works.front().second) && members[1].wait(works.front().first));
        works.pop_front();
        replies = asker->replies(kName, 0ms);
    }
    EXPECT(is_answer(replies[0], kCopy));
    for (const auto& [recv, send] : works) EXPECT(members[1].wait(recv) && members[0].wait(send));
    // A twentieth would be 40 MiB of rounds; ticks and pauses of a slow machine cost some.
    EXPECT(static_cast<uint64_t>(num_posted) * sent.size() > 10 * kCopy);
}

void test_all() {
    test_sizes();
    test_names_are_apart();
    test_without_a_connection();
    test_the_server_dials();
    test_a_connection_for_groups_too();
    test_a_server_that_ends();
    test_what_is_forgotten();
    test_a_body_that_is_too_large();
    test_too_many_requests();
    test_frames_that_nobody_wants();
    test_rounds_come_first();
}

}  // namespace

int main() {
    test_share();
    test_all();
    is_keyed = true;
    strange_identity();
    test_all();
    return passed("copies");
}
