// Signs of life on a store, and ways to a peer: who is silent is found, and nobody else.

#include <string>
#include <thread>

#include "check.h"
#include "exchange/failure/bounded_store.h"
#include "exchange/failure/pulse.h"
#include "exchange/failure/reach.h"
#include "hanging_store.h"

using namespace std::chrono_literals;
using diloco::Answer;
using diloco::Listener;
using diloco::Pulse;
using diloco::Ways;
using Ids = std::vector<int64_t>;

namespace {

const Ids kMembers{0, 1, 2};

// Looks until somebody is suspected.
Ids wait_for_suspects(Pulse& pulse, Pulse& beating) {
    while (pulse.suspects().empty()) {
        beating.beat();
        pulse.look();
        std::this_thread::sleep_for(5ms);
    }
    return pulse.suspects();
}

void test_who_does_not_beat_is_suspected() {
    const auto store = c10::make_intrusive<diloco_test::LocalStore>();
    Pulse own(store, "p", 0, kMembers, 2s);
    Pulse lively(store, "p", 1, kMembers, 2s);
    Pulse dead(store, "p", 2, kMembers, 2s);
    dead.beat();
    own.forgive();
    EXPECT(wait_for_suspects(own, lively) == Ids{2});
    EXPECT(own.seconds_silent(2) >= 2.0 && own.seconds_silent(1) < 2.0);
    own.forgive();
    EXPECT(own.suspects().empty());
}

// Also one that has never beaten.
void test_who_never_came_is_suspected() {
    const auto store = c10::make_intrusive<diloco_test::LocalStore>();
    Pulse own(store, "p", 0, {0, 1, 2}, 2s);
    Pulse lively(store, "p", 1, {0, 1, 2}, 2s);
    own.forgive();
    EXPECT(wait_for_suspects(own, lively) == Ids{2});
}

// A time in which nobody looked is no silence, however long it was.
void test_own_standstill() {
    const auto store = c10::make_intrusive<diloco_test::LocalStore>();
    Pulse own(store, "p", 0, {0, 1}, 2s);
    own.forgive();
    for (int i = 0; i < 3; ++i) {
        std::this_thread::sleep_for(800ms);
        own.look();
    }
    EXPECT(own.suspects().empty());
}

void test_silent_store() {
    const auto host = c10::make_intrusive<diloco_test::HangingStore>();
    Pulse own(c10::make_intrusive<diloco::BoundedStore>(host, 20ms), "p", 0, {0, 1}, 1s);
    own.forgive();
    host->hang();
    const auto begin = Pulse::Clock::now();
    while (Pulse::Clock::now() - begin < 2s) {
        own.beat();
        own.look();
        std::this_thread::sleep_for(5ms);
    }
    EXPECT(own.suspects().empty());
    host->wake();
}

void test_ways() {
    Listener peer("lo");
    std::string gone;
    {
        Listener closed("lo");
        gone = closed.address();
    }
    EXPECT(!peer.address().empty());
    const auto answers = diloco::try_to_reach({peer.address(), gone, "", "no address"}, 10s);
    EXPECT(answers == (std::vector<Answer>{Answer::kReached, Answer::kRefused, Answer::kUnknown,
                                           Answer::kUnknown}));
    peer.drain();
    // Our own way, and one that was not known when all began, are not judged.
    Ways ways(0, {0, 1, 2, 3}, {gone, peer.address(), gone, ""}, 1s, 1s);
    const Ways::Results results = ways.try_all();
    EXPECT(results.reached == Ids{1} && results.unreached == Ids{2} && results.refused == Ids{2});
    ways.forgive();
    while (ways.lost().empty()) {
        ways.look();
        std::this_thread::sleep_for(5ms);
    }
    EXPECT(ways.lost() == Ids{2});
    ways.forgive();
    EXPECT(ways.lost().empty());
}

// More than may wait to be accepted at once come, one after the other.
void test_drain() {
    Listener listener("lo");
    for (int i = 0; i < 300; ++i) {
        EXPECT(diloco::try_to_reach({listener.address()}, 10s)[0] == Answer::kReached);
        if (i % 100 == 0) listener.drain();
    }
    const std::vector<std::string> many(300, listener.address());
    for (const Answer answer : diloco::try_to_reach(many, 10s)) EXPECT(answer == Answer::kReached);
    listener.drain();
}

void test_no_interface() {
    EXPECT(Listener("no-such-interface").address().empty());
    EXPECT(!Listener("lo,other").address().empty());
    EXPECT(!Listener("").address().empty());
}

}  // namespace

int main() {
    test_who_does_not_beat_is_suspected();
    test_who_never_came_is_suspected();
    test_own_standstill();
    test_silent_store();
    test_ways();
    test_drain();
    test_no_interface();
    return passed("peers");
}
