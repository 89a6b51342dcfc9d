// Signs of life, and short messages between processes.
#include <atomic>
#include <map>

#include "link_world.h"

using namespace diloco_test;
using namespace std::chrono_literals;
using diloco::Address;
using diloco::link::Connection;
using diloco::link::Frame;
using diloco::link::FrameKind;
using diloco::link::kMostTellBytes;
using diloco::link::kMostToldBytes;
using diloco::link::kTellCost;
using diloco::link::Life;
using diloco::link::OutFrame;
using diloco::link::OwnClock;
using diloco::link::PeerLife;
using diloco::link::Phase;
using diloco::link::Request;
using diloco::link::Status;
using diloco::link::to_hex;
using Time = diloco::link::Clock::time_point;

namespace {

constexpr char kName[] = "control";
const std::string kStranger(32, '5');

using Messages = std::vector<std::pair<std::string, Bytes>>;

Place place_of(const LinkPtr& link) { return places({link}).front(); }

// Waits until a condition holds.
template <class Condition>
void until(Condition holds) {
    const auto end = std::chrono::steady_clock::now() + kEnough;
    while (!holds()) {
        EXPECT(std::chrono::steady_clock::now() < end);
        std::this_thread::sleep_for(5ms);
    }
}

void connect_to(const LinkPtr& link, const LinkPtr& peer) {
    until([&] { return link->reach(kName, {place_of(peer)}).front().empty(); });
}

// Two links that want each other, and expect messages of this name.
struct Pair {
    LinkPtr one = open_link(), other = open_link();

    Pair() {
        allow_all({one, other});
        connect_to(one, other);
        connect_to(other, one);
        one->told(kName, 0ms);
        other->told(kName, 0ms);
    }
};

PeerLife life_of(const LinkPtr& link, const std::string& nonce) {
    for (const PeerLife& one : link->life()) {
        if (one.nonce == nonce) return one;
    }
    return {};
}

Messages messages_of(const LinkPtr& link, size_t count) {
    Messages found;
    until([&] {
        for (auto& message : link->told(kName, 100ms)) found.push_back(std::move(message));
        return found.size() >= count;
    });
    return found;
}

Address address(uint16_t port) {
    Address made;
    auto* at = reinterpret_cast<sockaddr_in*>(&made.storage);
    at->sin_family = AF_INET;
    at->sin_port = htons(port);
    made.length = sizeof(sockaddr_in);
    return made;
}

// ----------------------------------------------------------------------------- without a link

void test_own_clock() {
    const Time begin{1h};
    OwnClock clock(begin);
    EXPECT(clock.at(begin) == 0ms && clock.at(begin + 400ms) == 400ms);
    clock.tick(begin + 500ms);
    EXPECT(clock.at(begin + 700ms) == 700ms);
    // Ten seconds in which this process stood still count as one.
    EXPECT(clock.at(begin + 10500ms) == 1500ms);
    clock.tick(begin + 10500ms);
    EXPECT(clock.at(begin + 10600ms) == 1600ms);
}

Frame beat_of(uint32_t number, uint64_t inner_step, uint64_t num_heard = 0) {
    Frame beat;
    beat.ticket = number;
    beat.offset = inner_step;
    beat.total = num_heard;
    beat.tag = static_cast<uint32_t>(Phase::kSteps);
    return beat;
}

void test_facts() {
    Life life;
    EXPECT(life.facts(1h).silent_s > 1e9 && life.facts(1h).still_s > 1e9);
    life.hear(10s);
    EXPECT(life.facts(12s).silent_s == 2 && life.facts(12s).still_s == 2);
    life.hear_beat(beat_of(1, 7), 12s);
    EXPECT(life.facts(12s).inner_step == 7 && life.facts(12s).phase == "steps");
    // Bytes without a step are life, and no progress; rounds in either direction are.
    life.hear(20s);
    life.hear_beat(beat_of(2, 7), 20s);
    EXPECT(life.facts(20s).silent_s == 0 && life.facts(20s).still_s == 8);
    life.hear_beat(beat_of(3, 7, 1000), 21s);
    EXPECT(life.facts(22s).still_s == 1);
    life.hear_round(500, 30s);
    EXPECT(life.facts(30s).still_s == 0 && life.num_heard() == 500);
    // The change of a group may set a replica back; an older beat says nothing.
    life.hear_beat(beat_of(5, 3, 1000), 31s);
    life.hear_beat(beat_of(4, 7, 1000), 32s);
    EXPECT(life.facts(32s).inner_step == 3 && life.facts(32s).still_s == 1);
    Frame strange = beat_of(6, 3, 1000);
    strange.tag = 77;
    life.hear_beat(strange, 33s);
    EXPECT(life.facts(33s).phase.empty());
}

void test_refusals() {
    const Time now{1h};
    Life life;
    // An address that has never accepted is refused by a filter, or is another host's.
    life.hear(0s);
    life.refuse(address(1), now);
    life.refuse(address(1), now + 1s);
    EXPECT(!life.facts(10s).is_refused);
    life.accept(address(1));
    const auto refuse_twice = [&](auto apart) {
        life.refuse(address(1), now);
        life.refuse(address(1), now + apart);
    };
    refuse_twice(299ms);
    EXPECT(!life.facts(10s).is_refused);
    refuse_twice(300ms);
    EXPECT(life.facts(10s).is_refused && life.facts(1s).is_refused);
    EXPECT(!life.facts(999ms).is_refused);
    // A byte, or a connection that is taken, withdraws the sign.
    life.hear(20s);
    EXPECT(!life.facts(30s).is_refused);
    refuse_twice(300ms);
    life.take(address(2));
    EXPECT(life.facts(30s).is_refused);
    life.take(address(1));
    EXPECT(!life.facts(30s).is_refused);
    // Another address of the same name.
    life.refuse(address(2), now);
    life.refuse(address(2), now + 1s);
    EXPECT(!life.facts(30s).is_refused);
}

// A message goes before bulk and copies, and after control frames.
void test_order_of_frames() {
    Connection connection;
    const auto message = std::make_shared<diloco::link::Message>();
    Bytes memory(1000);
    message->data = memory.data();
    message->num_bytes = memory.size();
    connection.bulk.push_back(message);
    OutFrame told;
    told.frame.kind = static_cast<uint8_t>(FrameKind::kTell);
    told.frame.length = 4;
    told.copy = {1, 2, 3, 4};
    connection.told_bytes = 4 + kTellCost;
    connection.messages.push_back(told);
    connection.put(FrameKind::kPing);
    std::array<iovec, 64> parts;
    EXPECT(connection.plan_write(parts.data(), 64, 1 << 20, true) == 5);
    const auto kind_of = [&](size_t part) {
        return static_cast<FrameKind>(static_cast<const Frame*>(parts[part].iov_base)->kind);
    };
    EXPECT(kind_of(0) == FrameKind::kPing && kind_of(1) == FrameKind::kTell);
    EXPECT(kind_of(3) == FrameKind::kData);
    // The kernel takes the ping: the message is before the bulk again, and a later ping before it.
    connection.wrote(sizeof(Frame));
    EXPECT(connection.messages.size() == 1 && connection.told_bytes == 4 + kTellCost);
    connection.put(FrameKind::kPong);
    EXPECT(connection.plan_write(parts.data(), 64, 1 << 20, false) == 3);
    EXPECT(kind_of(0) == FrameKind::kPong && kind_of(1) == FrameKind::kTell);
    connection.wrote(2 * sizeof(Frame) + 4);
    EXPECT(connection.messages.empty() && connection.told_bytes == 0);
}

// ------------------------------------------------------------------------------------- beats

void test_beats() {
    const Pair pair;
    EXPECT(pair.one->life().size() == 1);
    pair.one->set_progress(7, Phase::kEvaluation);
    pair.other->set_progress(1ull << 50, Phase::kCopying);
    until([&] {
        const PeerLife one = life_of(pair.other, pair.one->nonce());
        return one.inner_step == 7 && one.phase == "evaluation";
    });
    until([&] { return life_of(pair.one, pair.other->nonce()).inner_step == 1ull << 50; });
    EXPECT(life_of(pair.one, pair.other->nonce()).phase == "copying");
    // A process that nobody wants any more is not in the table.
    pair.one->reach(kName, {});
    EXPECT(pair.one->life().empty());
}

// Bytes of a round move on both sides; beats alone do not.
void test_progress_of_rounds() {
    const Members members = connect_new(2, "still");
    const auto still_s = [&](size_t rank) {
        return life_of(members[rank].link, members[1 - rank].link->nonce()).still_s;
    };
    until([&] { return still_s(0) > 1.2 && still_s(1) > 1.2; });
    until([&] { return life_of(members[0].link, members[1].link->nonce()).silent_s < 1; });
    EXPECT(still_s(0) > 1.2);
    const Bytes sent = pattern(300'000, 3);
    Bytes received(sent.size());
    const Work recv = members[1].recv(0, 1, received);
    EXPECT(members[0].wait(members[0].send(1, 1, sent)) && members[1].wait(recv));
    EXPECT(still_s(1) < 1.2);
    // The sender hears of it by a beat.
    until([&] { return still_s(0) < 1.2; });
}

void test_a_process_that_ends() {
    Pair pair;
    const std::string nonce = pair.other->nonce(), at = pair.other->address();
    EXPECT(!life_of(pair.one, nonce).is_refused);
    pair.other->close();
    until([&] { return life_of(pair.one, nonce).is_refused; });
    EXPECT(life_of(pair.one, nonce).silent_s >= 1);
    // Another process at the address is no life of this one. One of another key says no more than
    // a proxy would.
    if (is_keyed) return;
    const LinkPtr next = open_link(at, at);
    allow_all({pair.one, next});
    const int64_t before = next->counters().at("strangers");
    until([&] { return next->counters().at("strangers") > before + 2; });
    until([&] { return life_of(pair.one, nonce).is_refused; });
}

// A process that was only dialled by the peer knows no address that accepts.
void test_no_refusal_without_an_own_dial() {
    const LinkPtr one = open_link(), other = open_link();
    allow_all({one, other});
    connect_to(other, one);
    // The side that dialled is connected a moment before the other side.
    until([&] { return one->counters().at("open") == 1; });
    // Without the address of the peer, this side does not dial.
    Place place = place_of(other);
    place.address.clear();
    EXPECT(one->reach(kName, {place}).front().empty());
    const std::string nonce = other->nonce();
    until([&] { return life_of(one, nonce).silent_s < 1; });
    other->close();
    until([&] { return life_of(one, nonce).silent_s > 2; });
    EXPECT(!life_of(one, nonce).is_refused);
}

// A listener that takes connections, and answers nothing, stands for a stopped process.
void test_a_process_that_stops_is_not_refused() {
    Pair pair;
    const std::string nonce = pair.other->nonce(), at = pair.other->address();
    pair.other->close();
    until([&] { return life_of(pair.one, nonce).is_refused; });
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(std::stoi(at.substr(at.rfind(':') + 1))));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    EXPECT(bind(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0 && listen(fd, 8) == 0);
    until([&] { return !life_of(pair.one, nonce).is_refused; });
    ::close(fd);
}

// Stands still on the link's thread.
class Slow : public diloco::link::Responder {
  public:
    bool take(Request) override {
        std::this_thread::sleep_for(5s);
        is_done = true;
        return false;
    }
    std::atomic<bool> is_done{false};
};

void test_a_link_that_stands_still() {
    const Pair pair;
    const auto slow = std::make_shared<Slow>();
    pair.one->set_responder("slow", slow);
    until([&] { return life_of(pair.one, pair.other->nonce()).silent_s < 1; });
    EXPECT(pair.other->request(place_of(pair.one), "slow", Bytes(1), 1) != 0);
    double most = 0;
    until([&] {
        most = std::max(most, life_of(pair.one, pair.other->nonce()).silent_s);
        return slow->is_done.load();
    });
    most = std::max(most, life_of(pair.one, pair.other->nonce()).silent_s);
    EXPECT(most < 4);
}

// ----------------------------------------------------------------------------------- messages

void test_messages() {
    const Pair pair;
    std::vector<Bytes> sent;
    for (const size_t size : {0, 1, 1024, 4096, 65535, 65536, 3}) {
        sent.push_back(pattern(size, static_cast<int>(size)));
    }
    for (const auto& [from, to] : {std::pair(pair.one, pair.other), {pair.other, pair.one}}) {
        for (const Bytes& bytes : sent) EXPECT(from->tell(to->nonce(), kName, bytes));
        const Messages found = messages_of(to, sent.size());
        EXPECT(found.size() == sent.size());
        for (size_t i = 0; i < sent.size(); ++i) {
            EXPECT(found[i].first == from->nonce() && found[i].second == sent[i]);
        }
    }
    EXPECT(!pair.one->tell(kStranger, kName, {}));
    std::string error;
    try {
        pair.one->tell(pair.other->nonce(), kName, Bytes(kMostTellBytes + 1));
    } catch (const std::invalid_argument& refused) {
        error = refused.what();
    }
    EXPECT(says(error, "a message has at most 65536 bytes, got 65537"));
    // Names are apart, and a message of a name that nobody has asked for is gone.
    EXPECT(pair.one->tell(pair.other->nonce(), "another", {1}));
    EXPECT(pair.one->tell(pair.other->nonce(), kName, {2}));
    EXPECT(messages_of(pair.other, 1)[0].second == Bytes{2});
    EXPECT(pair.other->told("another", 0ms).empty());
    pair.other->close();
    until([&] { return !pair.one->tell(pair.other->nonce(), kName, {}); });
}

// The sender finds more than a MiB in the way; the receiver keeps the newest.
void test_a_flood() {
    const Pair pair;
    constexpr int kCount = 64;
    const int64_t before = pair.other->counters().at("received_bytes");
    for (int i = 0; i < kCount; ++i) {
        const Bytes bytes(kMostTellBytes, static_cast<uint8_t>(i));
        until([&] { return pair.one->tell(pair.other->nonce(), kName, bytes); });
    }
    until([&] {
        const int64_t now = pair.other->counters().at("received_bytes");
        return now - before >= static_cast<int64_t>(kCount * kMostTellBytes);
    });
    const Messages found = pair.other->told(kName, 100ms);
    EXPECT(found.size() == kMostToldBytes / (kMostTellBytes + kTellCost));
    for (size_t i = 0; i < found.size(); ++i) {
        EXPECT(found[i].second[0] == kCount - found.size() + i);
    }
    EXPECT(pair.other->counters().at("dropped") >= kCount - static_cast<int64_t>(found.size()));
    // There is room again.
    EXPECT(pair.one->tell(pair.other->nonce(), kName, {9}));
    EXPECT(messages_of(pair.other, 1)[0].second == Bytes{9});
}

// A stranger that the link knows by its greeting alone.
struct Known {
    LinkPtr link = open_link();
    std::unique_ptr<Stranger> stranger;

    Known() {
        allow_all({link});
        link->told(kName, 0ms);
        stranger = std::make_unique<Stranger>(link->address());
        EXPECT(stranger->greet(link->nonce()).status == static_cast<uint32_t>(Status::kWelcome));
    }
    bool say(const Bytes& bytes, uint32_t length) const {
        Frame frame;
        frame.kind = static_cast<uint8_t>(FrameKind::kTell);
        frame.token = diloco::link::hash_of(kName);
        frame.length = length;
        return stranger->write(frame) && stranger->write(bytes.data(), bytes.size());
    }
};

void test_a_peer_that_does_not_read() {
    const Known known;
    const Bytes bytes(kMostTellBytes);
    // The kernel keeps some MiB, and the link one.
    int num_sent = 0;
    while (known.link->tell(kStranger, kName, bytes)) EXPECT(++num_sent < 1000);
    EXPECT(num_sent >= 15);
    // Beats do not pile up: six are due, and one waits.
    const std::string key = is_keyed ? to_hex(strange_identity()->public_key()) : "";
    EXPECT(known.link->reach(kName, {{kStranger, "", key}}).front().empty());
    std::this_thread::sleep_for(3s);
    int num_beats = 0;
    while (num_sent > 0) {
        Frame frame;
        EXPECT(known.stranger->read(&frame, sizeof(frame)));
        Bytes payload(frame.length);
        if (frame.length > 0) EXPECT(known.stranger->read(payload.data(), payload.size()));
        num_beats += frame.kind == static_cast<uint8_t>(FrameKind::kBeat) ? 1 : 0;
        num_sent -= frame.kind == static_cast<uint8_t>(FrameKind::kTell) ? 1 : 0;
    }
    EXPECT(num_beats < 5);
}

void test_messages_of_strangers() {
    const Known known;
    // They say who they are once, in their greeting; and have less room here.
    for (uint8_t i = 0; i < 4; ++i) EXPECT(known.say(Bytes(30'000, i), 30'000));
    EXPECT(known.say({}, 0));
    Messages found = messages_of(known.link, 1);
    while (!found.back().second.empty()) {
        for (auto& one : messages_of(known.link, 1)) found.push_back(std::move(one));
    }
    for (const auto& [nonce, bytes] : found) EXPECT(nonce == kStranger);
    EXPECT(known.say({}, kMostTellBytes + 1));
    EXPECT(known.stranger->is_closed());
    // A process that began anew at this address hears nothing of what was meant for the former.
    Stranger late(known.link->address());
    EXPECT(late.greet(std::string(32, '7')).status == static_cast<uint32_t>(Status::kOtherProcess));
    EXPECT(late.is_closed());
}

void test_strangers_have_little_room() {
    const Known known;
    const int64_t before = known.link->counters().at("received_bytes");
    for (uint8_t i = 0; i < 20; ++i) EXPECT(known.say(Bytes(30'000, i), 30'000));
    until([&] { return known.link->counters().at("received_bytes") - before >= 20 * 30'000; });
    const Messages found = known.link->told(kName, 100ms);
    EXPECT(found.size() == 2 && found[1].second == Bytes(30'000, 19));
}

// Answers with 64 MiB.
class Large : public diloco::link::Responder {
  public:
    bool take(Request request) override {
        thread = std::thread([request] {
            const auto bytes = std::make_shared<Bytes>(64 << 20);
            request.answer({1}, {bytes, bytes->data(), bytes->size()});
        });
        return true;
    }
    std::thread thread;
};

// A message arrives before a body that has begun, to a reader that takes all in order.
void test_a_message_overtakes_bulk() {
    const Known known;
    const auto large = std::make_shared<Large>();
    known.link->set_responder("large", large);
    Frame request;
    request.kind = static_cast<uint8_t>(FrameKind::kRequest);
    request.token = diloco::link::hash_of("large");
    request.ticket = 1;
    EXPECT(known.stranger->write(request));
    uint64_t num_bytes = 0;
    bool is_told = false;
    while (!is_told) {
        Frame frame;
        EXPECT(known.stranger->read(&frame, sizeof(frame)));
        Bytes payload(frame.length);
        if (frame.length > 0) EXPECT(known.stranger->read(payload.data(), payload.size()));
        if (frame.kind == static_cast<uint8_t>(FrameKind::kCopy)) {
            if (num_bytes == 0) EXPECT(known.link->tell(kStranger, kName, {1, 2, 3}));
            num_bytes += frame.length;
            EXPECT(num_bytes < 32 << 20);
        }
        is_told = frame.kind == static_cast<uint8_t>(FrameKind::kTell);
        if (is_told) EXPECT(payload == Bytes({1, 2, 3}));
    }
    large->thread.join();
}

void test_all() {
    test_beats();
    test_progress_of_rounds();
    test_a_process_that_ends();
    test_no_refusal_without_an_own_dial();
    test_a_process_that_stops_is_not_refused();
    test_messages();
    test_a_flood();
    test_a_peer_that_does_not_read();
    test_messages_of_strangers();
    test_strangers_have_little_room();
    test_a_message_overtakes_bulk();
}

}  // namespace

int main() {
    test_own_clock();
    test_facts();
    test_refusals();
    test_order_of_frames();
    test_a_link_that_stands_still();
    test_all();
    is_keyed = true;
    strange_identity();
    test_all();
    return passed("life");
}
