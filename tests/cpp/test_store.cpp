// The host of a store and its clients over real sockets: what a lost connection, a router that
// forgets, a host that was started again and many clients at once leave behind.
#include <c10/util/Exception.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "exchange/store/store_client.h"
#include "exchange/store/store_host.h"
#include "exchange/store/table.h"

using namespace std::chrono_literals;
using diloco::Descriptor;
using diloco::StoreClient;
using diloco::StoreHost;
using diloco::link::Identity;
using diloco::link::make_key;
using diloco::store::Clock;

namespace {

using Bytes = std::vector<uint8_t>;
using IdentityPtr = std::shared_ptr<Identity>;

const Bytes kOne{'1'}, kTwo{'2'};

int listen_on_loopback(uint16_t port = 0) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int yes = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    EXPECT(listen(fd, 1024) == 0);
    return fd;
}

uint16_t port_of(int fd) {
    sockaddr_in address{};
    socklen_t length = sizeof(address);
    EXPECT(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0);
    return ntohs(address.sin_port);
}

int connect_to(uint16_t port) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    return fd;
}

struct Hosted {
    c10::intrusive_ptr<StoreHost> store;
    uint16_t port = 0;
};

Hosted host(StoreHost::Options options = {}, uint16_t port = 0) {
    const int fd = listen_on_loopback(port);
    options.listener = Descriptor([fd] { return fd; });
    options.timeout = 30s;
    if (options.drop_after == 0ms) options.drop_after = 600s;
    const uint16_t found = port_of(fd);
    return {c10::make_intrusive<StoreHost>(std::move(options)), found};
}

c10::intrusive_ptr<StoreClient> client_of(uint16_t port, IdentityPtr identity = nullptr,
                                          std::set<diloco::link::PublicKey> allowed = {}) {
    StoreClient::Place place{"127.0.0.1", port, std::move(identity), std::move(allowed)};
    return c10::make_intrusive<StoreClient>(std::move(place), 10s);
}

template <typename Error>
std::string error_of(const std::function<void()>& call) {
    try {
        call();
    } catch (const Error& error) {
        return error.what_without_backtrace();
    }
    return "";
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// Passes bytes between clients and a host, as a router does.
class Router {
  public:
    explicit Router(uint16_t target) : target_(target), listener_(listen_on_loopback()) {
        thread_ = std::thread([this] { accept_all(); });
    }
    ~Router() {
        is_over_ = true;
        shutdown(listener_, SHUT_RDWR);
        thread_.join();
        for (std::thread& one : passing_) one.join();
        close(listener_);
    }
    Router(const Router&) = delete;
    Router& operator=(const Router&) = delete;

    uint16_t port() const { return port_of(listener_); }
    // Nothing passes any more on the connections of now; their ends hear nothing of that.
    void forget() { forgotten_ = num_.load(); }
    // The connection that passes the next packet from a client ends before the answer.
    void lose_an_answer() { ++lost_; }

  private:
    void accept_all() {
        while (!is_over_) {
            const int fd = accept(listener_, nullptr, nullptr);
            if (fd >= 0) passing_.emplace_back([this, fd, number = ++num_] { pass(fd, number); });
        }
    }

    void pass(int client, int number) {
        const int server = connect_to(target_);
        pollfd ends[2] = {{client, POLLIN, 0}, {server, POLLIN, 0}};
        char bytes[65536];
        bool loses = false;
        while (!is_over_) {
            if (poll(ends, 2, 20) <= 0 || number <= forgotten_) continue;
            const int from = ends[0].revents != 0 ? 0 : 1;
            const ssize_t got = recv(ends[from].fd, bytes, sizeof(bytes), 0);
            // A first connection has said its hello long before an answer is to be lost.
            if (from == 0 && lost_ > 0 && lost_.fetch_sub(1) > 0) loses = true;
            if (got <= 0 || (from == 1 && loses)) break;
            send(ends[1 - from].fd, bytes, static_cast<size_t>(got), MSG_NOSIGNAL);
        }
        close(client);
        close(server);
    }

    const uint16_t target_;
    const int listener_;
    std::atomic<bool> is_over_{false};
    std::atomic<int> num_{0}, forgotten_{0}, lost_{0};
    std::thread thread_;
    std::vector<std::thread> passing_;
};

void test_a_lost_answer_changes_nothing_twice() {
    const Hosted hosted = host();
    Router router(hosted.port);
    const auto store = client_of(router.port());
    for (int i = 0; i < 20; ++i) {
        router.lose_an_answer();
        EXPECT(store->add("n", 1) == i + 1);
        store->append("text", {'x'});
        router.lose_an_answer();
        EXPECT(store->compareSet("swap", i == 0 ? Bytes{} : Bytes{static_cast<uint8_t>(i)},
                                 {static_cast<uint8_t>(i + 1)}) ==
               Bytes{static_cast<uint8_t>(i + 1)});
        store->set("key", kOne);
        router.lose_an_answer();
        EXPECT(store->deleteKey("key"));
    }
    EXPECT(store->get("text").size() == 20);
    // A swap of a record alone has an unknown outcome: the record itself says which one.
    router.lose_an_answer();
    const std::string why =
        error_of<c10::DistStoreError>([&] { store->swap_record("run", "", "one", 5s); });
    EXPECT(has(why, "has broken"));
    EXPECT(store->read_record("run", 5s).first == "one");
}

void test_a_router_that_forgets_costs_one_silence() {
    const Hosted hosted = host();
    Router router(hosted.port);
    const auto store = client_of(router.port());
    store->set("a", kOne);
    for (int i = 0; i < 2; ++i) {
        router.forget();
        EXPECT(store->read_record("run", 3s).first.empty());
        EXPECT(store->add("n", 1) == i + 1);
        EXPECT(store->get("a") == kOne);
    }
    // A wait on a silent connection ends, too, and the host knows one client of this name.
    std::thread late([&] {
        std::this_thread::sleep_for(100ms);
        router.forget();
        hosted.store->set("late", kTwo);
    });
    EXPECT(error_of<c10::DistStoreError>([&] { store->wait({"late", "never"}, 500ms); }) != "");
    late.join();
    EXPECT(store->get("late") == kTwo);
    EXPECT(hosted.store->num_clients() == 1);
}

// The table as a journal brings it back.
Hosted host_again(const std::string& table_id, uint16_t port) {
    StoreHost::Options options;
    options.table_id = table_id;
    options.is_journalled = true;
    options.records = {{"run", "kept"}};
    return host(std::move(options), port);
}

void test_a_host_that_forgot_is_not_followed() {
    StoreHost::Options first;
    first.table_id = std::string(32, 'a');
    Hosted hosted = host(std::move(first));
    const auto store = client_of(hosted.port);
    store->set("a", kOne);
    hosted.store->close();
    const std::string gone = error_of<c10::DistNetworkError>([&] { store->set("a", kTwo); });
    EXPECT(has(gone, "is not there any more: Connection refused"));
    const Hosted other = host({}, hosted.port);
    const std::string why = error_of<c10::DistNetworkError>([&] { store->set("a", kTwo); });
    EXPECT(has(why, "was started again and has forgotten everything"));
    EXPECT(store->facts().table_id != store->table_id() && !other.store->check({"a"}));
    other.store->close();
    // The same table again, as a journal brings it back.
    const Hosted back = host_again(store->table_id(), hosted.port);
    EXPECT(store->read_record("run", 5s).first == "kept");
    EXPECT(store->facts().is_durable);
}

void test_a_restart_loses_keys_and_no_records() {
    StoreHost::Options first;
    first.table_id = std::string(32, 'b');
    first.is_journalled = true;
    Hosted hosted = host(std::move(first));
    const auto store = client_of(hosted.port), looker = client_of(hosted.port);
    store->set("a", kOne);
    hosted.store->close();
    EXPECT(error_of<c10::DistNetworkError>([&] { store->check({"a"}); }) != "");
    const Hosted back = host_again(store->table_id(), hosted.port);
    EXPECT(store->read_record("run", 5s).first == "kept");
    for (int i = 0; i < 2; ++i) {
        const std::string why = error_of<c10::DistNetworkError>([&] { store->add("n", 1); });
        EXPECT(has(why, "has forgotten its keys"));
    }
    // A client that had no keys there begins anew.
    EXPECT(looker->read_record("run", 5s).first == "kept" && looker->add("n", 1) == 1);
    EXPECT(looker->another("")->read_record("run", 5s).first == "kept");
    const auto other = looker->another(std::string(32, 'c'));
    EXPECT(has(error_of<c10::DistNetworkError>([&] { other->read_record("run", 5s); }), "cccc"));
}

void test_keys_of_any_kind_may_be_waited_for() {
    const Hosted hosted = host();
    const auto store = client_of(hosted.port);
    for (const std::string& key : {std::string(), std::string("\0\xff", 2)}) {
        EXPECT(error_of<c10::DistStoreError>([&] { store->wait({key}, 50ms); }) != "");
        store->set(key, kOne);
        EXPECT(store->get(key) == kOne);
    }
    // A small request may ask for much: for one large value a thousand times.
    store->set("large", Bytes(1 << 20, 'x'));
    const std::vector<std::string> many(1000, "large");
    EXPECT(has(error_of<c10::DistStoreError>([&] { store->multiGet(many); }), "at most 64 MiB"));
    std::vector<std::string> waited = many;
    waited.emplace_back("late");
    std::thread late([&] {
        std::this_thread::sleep_for(50ms);
        hosted.store->set("late", kOne);
    });
    EXPECT(has(error_of<c10::DistStoreError>([&] { store->multiGet(waited); }), "at most 64 MiB"));
    late.join();
    EXPECT(store->get("late") == kOne);
}

// A connection carries one question at a time, and a wait may last long.
void test_waits_leave_the_connection_to_other_threads() {
    const Hosted hosted = host();
    const auto store = client_of(hosted.port);
    std::vector<std::thread> waits;
    waits.emplace_back([&] { store->wait({"key"}, 60s); });
    const auto [none, revision] = store->read_record("run", 5s);
    waits.emplace_back([&, revision = revision] {
        EXPECT(store->watch_record("run", revision, 60s).first == "one");
    });
    std::this_thread::sleep_for(500ms);
    for (int i = 1; i <= 3; ++i) EXPECT(store->add("n", 1) == i);
    store->set("key", kOne);
    EXPECT(store->swap_record("run", "", "one", 2s));
    for (std::thread& wait : waits) wait.join();
}

void test_many_clients_wait_for_one_key() {
    const Hosted hosted = host();
    constexpr int kClients = 200;
    std::atomic<int> num_there{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < kClients; ++i) {
        threads.emplace_back([&, i] {
            const auto store = client_of(hosted.port);
            store->add("ready", 1);
            if (store->multiGet({"ready", i % 2 ? "key" : "other"})[1] == kOne) ++num_there;
        });
    }
    while (!hosted.store->check({"ready"}) || hosted.store->add("ready", 0) < kClients) {
        std::this_thread::sleep_for(1ms);
    }
    hosted.store->set("key", kOne);
    hosted.store->multiSet({"another", "other"}, {kTwo, kOne});
    for (std::thread& thread : threads) thread.join();
    EXPECT(num_there == kClients);
}

void test_strangers_keep_nobody_out() {
    const Hosted hosted = host();
    std::vector<Descriptor> silent;
    for (int i = 0; i < 600; ++i) {
        silent.emplace_back([&] { return connect_to(hosted.port); });
    }
    const auto begin = Clock::now();
    EXPECT(client_of(hosted.port)->add("n", 1) == 1);
    EXPECT(Clock::now() - begin < 5s);  // the strangers' own time
    // Bytes of no packet, and a request before any hello.
    for (const std::string& bytes : {std::string(64, '\xff'), std::string("GET / HTTP/1.0\r\n\r\n"),
                                     std::string("\x09\0\0\0\0\0\0\0\x08\0\0\0\0\0\0\0\0", 17)}) {
        const Descriptor fd([&] { return connect_to(hosted.port); });
        EXPECT(send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0);
        char byte = 0;
        EXPECT(recv(fd.get(), &byte, 1, 0) <= 0);
    }
}

void test_keys_decide() {
    const IdentityPtr own = Identity::open(make_key().first);
    const IdentityPtr writer = Identity::open(make_key().first);
    const IdentityPtr reader = Identity::open(make_key().first);
    StoreHost::Options options;
    options.identity = own;
    options.allowed = {writer->public_key()};
    const Hosted hosted = host(std::move(options));
    hosted.store->allow({writer->public_key()}, {reader->public_key()});
    const auto store = client_of(hosted.port, writer, {own->public_key()});
    const auto looker = client_of(hosted.port, reader, {own->public_key()});
    store->set("a", kOne);
    EXPECT(store->swap_record("run", "", "one", 5s));
    EXPECT(store->beat("run", "m", "text", 5s).size() == 1);
    EXPECT(looker->get("a") == kOne && looker->read_record("run", 5s).first == "one");
    EXPECT(looker->beat("run", "", "", 5s).size() == 1);
    for (const std::function<void()>& change : std::vector<std::function<void()>>{
             [&] { looker->set("a", kTwo); }, [&] { looker->add("n", 1); },
             [&] { looker->append("a", kTwo); }, [&] { looker->deleteKey("a"); },
             [&] { looker->multiSet({"a"}, {kTwo}); }, [&] { looker->compareSet("a", kOne, kTwo); },
             [&] { looker->swap_record("run", "one", "two", 5s); },
             [&] { looker->beat("run", "m", "", 5s); }}) {
        EXPECT(has(error_of<c10::DistStoreError>(change), "may only read"));
    }
    EXPECT(store->get("a") == kOne && store->beat("run", "", "", 5s).size() == 1);
    // A key that may write can write under any name, as with beats.
    EXPECT(store->post("run", "m", "own") && looker->post("run", "m", "forged"));
    EXPECT(looker->read_record("run", 5s).first == "one" && store->get("a") == kOne);
    EXPECT(hosted.store->posted().size() == 1 && hosted.store->posted()[0].text == "own");
    // A removed key ends its connections, and is let in again when it is back.
    hosted.store->allow({}, {reader->public_key()});
    const std::string why = error_of<c10::DistStoreError>([&] { store->set("a", kTwo); });
    EXPECT(has(why, "does not let in the key of this process") && store->facts().is_refused);
    hosted.store->allow({writer->public_key()}, {});
    store->set("a", kTwo);
    EXPECT(hosted.store->get("a") == kTwo && !store->facts().is_refused);
    // One side with keys, the other without.
    EXPECT(has(error_of<c10::DistStoreError>([&] { client_of(hosted.port); }), "has keys: give"));
    const Hosted plain = host();
    EXPECT(has(error_of<c10::DistStoreError>([&] { client_of(plain.port, writer); }),
               "does not speak TLS as a store with keys does"));
}

void test_swaps_wait_for_the_journal() {
    StoreHost::Options options;
    options.is_journalled = true;
    const Hosted hosted = host(std::move(options));
    const auto store = client_of(hosted.port), reader = client_of(hosted.port);
    std::vector<diloco::store::Change> written;
    std::atomic<bool> is_over{false}, is_full{false};
    std::thread journal([&] {
        while (!is_over) {
            const auto changes = hosted.store->take_changes(20ms);
            if (changes.empty()) continue;
            EXPECT(reader->read_record(changes[0].first, 5s).first != changes[0].second);
            if (!is_full) written.insert(written.end(), changes.begin(), changes.end());
            hosted.store->settle(is_full ? "the disk is full" : "", is_full);
        }
    });
    EXPECT(store->swap_record("run", "", "0", 5s));
    std::vector<std::thread> writers;
    std::atomic<int> num_swapped{0};
    for (int i = 0; i < 8; ++i) {
        writers.emplace_back([&] {
            const auto own = client_of(hosted.port);
            for (int done = 0; done < 25;) {
                const std::string old = own->read_record("run", 5s).first;
                if (!own->swap_record("run", old, std::to_string(std::stoi(old) + 1), 5s)) continue;
                ++done;
                ++num_swapped;
            }
        });
    }
    for (std::thread& writer : writers) writer.join();
    EXPECT(num_swapped == 200 && store->read_record("run", 5s).first == "200");
    EXPECT(written.size() == 201 && written.back().second == "200");
    is_full = true;
    const std::string why =
        error_of<c10::DistStoreError>([&] { store->swap_record("run", "200", "201", 5s); });
    EXPECT(has(why, "the disk is full; whether a crash would leave the swap is unknown"));
    // A record that the journal does not hold is not there; a swap of another one fails in any
    // case.
    EXPECT(store->read_record("run", 5s).first == "200");
    EXPECT(!store->swap_record("run", "7", "8", 5s));
    is_over = true;
    journal.join();
    EXPECT(store->read_record("other", 5s) == StoreClient::Record("", 0));
}

void test_a_watch_ends_with_a_change() {
    const Hosted hosted = host();
    const auto store = client_of(hosted.port), other = client_of(hosted.port);
    const auto [none, revision] = store->read_record("run", 5s);
    EXPECT(none.empty() && store->watch_record("run", revision, 50ms).second == revision);
    std::thread late([&] {
        std::this_thread::sleep_for(50ms);
        EXPECT(other->swap_record("another", "", "x", 5s));
        EXPECT(other->swap_record("run", "", "one", 5s));
    });
    const auto [record, next] = store->watch_record("run", revision, 60s);
    late.join();
    EXPECT(record == "one" && next != revision);
    EXPECT(store->watch_record("run", revision, 60s).second == next);
    EXPECT(other->swap_record("run", "one", "", 5s));
    EXPECT(store->watch_record("run", next, 60s) == StoreClient::Record("", 0));
}

void test_limits_are_sentences() {
    StoreHost::Options options;
    options.drop_after = 300ms;
    const Hosted hosted = host(std::move(options));
    const auto store = client_of(hosted.port);
    const auto refuses = [](const char* part, const std::function<void()>& call) {
        EXPECT(has(error_of<c10::DistStoreError>(call), part));
    };
    refuses("at most 61440 bytes, got 61441",
            [&] { store->swap_record("run", "", std::string(61441, 'x'), 5s); });
    refuses("at most 16384 bytes, got 16385",
            [&] { store->beat("run", "m", std::string(16385, 'x'), 5s); });
    for (const std::string& name :
         {std::string(), std::string("a b"), std::string("a/b"), std::string("a\n"),
          std::string("\xc3"), std::string("\xed\xa0\x80"), std::string(401, 'x')}) {
        refuses("run must have 1 to 400 bytes of UTF-8",
                [&] { store->swap_record(name, "", "x", 5s); });
    }
    EXPECT(store->swap_record("\u00fcber", "", "x", 5s));
    EXPECT(store->beat("run", "a/b", "x", 5s).size() == 1);
    std::this_thread::sleep_for(400ms);
    EXPECT(store->beat("run", "c", "y", 5s).size() == 1);
    for (int i = 0; i < 1023; ++i) EXPECT(store->swap_record("r" + std::to_string(i), "", "x", 5s));
    refuses("holds 1024 runs, no more fit", [&] { store->swap_record("last", "", "x", 5s); });
    EXPECT(store->swap_record("r0", "x", "", 5s) && store->swap_record("last", "", "x", 5s));
    const std::vector<std::string> keys((1 << 16) + 1, "key");
    refuses("takes at most 65536 keys", [&] { store->check(keys); });
}

void test_a_look_brings_what_has_changed() {
    diloco::store::Beats beats(1h);
    const auto first = beats.beat("run", "b", "one\n1");
    EXPECT(first.is_whole && first.changed.size() == 3 && first.counts == std::string("\x01"));
    EXPECT(beats.beat("run", "a", "two\n1").is_whole);
    // Another second line is a beat, and no news.
    const auto second = beats.beat("run", "a", "two\n2", first.version);
    EXPECT(!second.is_whole && second.changed.size() == 3 && second.changed[1] == "two\n2");
    EXPECT(second.counts == std::string("\x02\x01"));
    const auto third = beats.beat("run", "b", "one\n2", second.version);
    EXPECT(!third.is_whole && third.changed.empty() && third.counts == std::string("\x02\x02"));
    const auto fourth = beats.beat("run", "b", "three", third.version);
    EXPECT(!fourth.is_whole && fourth.changed[0] == "b" && fourth.changed[1] == "three");
    // One has gone: the rest comes as a whole, as it does to a client of another host.
    const auto fifth = beats.beat("run", "a", "", fourth.version);
    EXPECT(fifth.is_whole && fifth.changed.size() == 3 && fifth.counts == std::string("\x03"));
    EXPECT(beats.beat("run", "", "", fifth.version + 1).is_whole);
    EXPECT(!beats.beat("run", "", "", fifth.version).is_whole);
}

void test_a_post_is_for_the_host_alone() {
    StoreHost::Options options;
    options.drop_after = 300ms;
    const Hosted hosted = host(std::move(options));
    const auto store = client_of(hosted.port), other = client_of(hosted.port);
    const auto posted = [&] {
        // The host does what one client asks in order.
        store->read_record("run", 5s);
        return hosted.store->posted();
    };
    EXPECT(posted().empty());
    const auto look = other->look("run", "b", "beat", 0, 0, 5s);
    const StoreHost::Facts before = hosted.store->facts();
    EXPECT(before.connections == 2 && before.requests == 4 && before.received_bytes > 0);
    const std::string longest(diloco::store::Beats::kMostPosted, 'x');
    EXPECT(store->post("run", "a", "one") && store->post("run", "a", longest));
    hosted.store->post("other", "own", "two");
    auto found = posted();
    EXPECT(found.size() == 2 && found[0].run == "other" && found[0].text == "two");
    EXPECT(found[1].member == "a" && found[1].text == longest && found[1].age < 10s);
    // A post has no answer, and no member reads a post.
    const StoreHost::Facts after = hosted.store->facts();
    const int64_t of_read = 8 + 1 + 8 + 8 + 8 + 1;  // no record, and revision 0
    EXPECT(after.requests == before.requests + 3);
    EXPECT(after.sent_bytes == before.sent_bytes + of_read);
    const auto again = other->look("run", "b", "beat", look.version, look.revision, 5s);
    EXPECT(again.beats.empty() && again.counts.size() == 1 && again.version == look.version);
    EXPECT(hosted.store->beats().size() == 1 && hosted.store->beats()[0].member == "b");
    // A post that does not fit changes nothing, and ends no connection.
    EXPECT(store->post("run", "a", longest + "x") && store->post("a/b", "a", "x"));
    EXPECT(posted().size() == 2 && posted()[1].text == longest);
    EXPECT(hosted.store->facts().refused_posts == 2 && after.refused_posts == 0);
    EXPECT(store->post("run", "a", "") && posted().size() == 1);
    std::this_thread::sleep_for(500ms);
    EXPECT(posted().empty() && hosted.store->beats().empty());
    EXPECT(store->swap_record("run", "", "x", 5s));
    const auto records = hosted.store->all_records();
    EXPECT(records.size() == 1 && records.at("run") == "x");
    hosted.store->close();
    EXPECT(!store->post("run", "a", "one"));
}

void test_the_memory_of_beats_and_swaps_has_bounds() {
    using diloco::store::Beats, diloco::store::Records;
    const auto refusal = [](const std::function<void()>& call) -> std::string {
        try {
            call();
        } catch (const std::invalid_argument& error) {
            return error.what();
        }
        return "";
    };
    Beats beats(1h);
    const std::string longest(Beats::kMostBytes, 'x');
    const auto beat = [&](int member, const std::string& text) {
        const std::string run = "run" + std::to_string(member / 2);
        return refusal([&] { beats.beat(run, std::to_string(member), text); });
    };
    const int most = Beats::kMostSum / Beats::kMostBytes;
    for (int member = 0; member < most; ++member) EXPECT(beat(member, longest).empty());
    EXPECT(has(beat(most, "x"), "holds the beats of 4096 members in 67108864 bytes"));
    // A beat takes the place of the one before; one that goes leaves room.
    EXPECT(beat(0, longest).empty() && beat(0, "x").empty() && beat(most, "x").empty());
    EXPECT(beat(1, "").empty() && beat(1, longest).empty());
    Beats posts(1h, Beats::kMostPosted);
    const auto post = [&](size_t run, size_t member, size_t size) {
        const std::string name = std::to_string(member), text(size, 'x');
        return refusal([&] { posts.put("run" + std::to_string(run), name, text); });
    };
    EXPECT(has(post(0, 0, Beats::kMostPosted + 1), "at most 2048 bytes, got 2049"));
    for (size_t i = 0; i < Beats::kMostBeats; ++i) {
        EXPECT(post(i / Beats::kMostMembers, i, Beats::kMostPosted).empty());
    }
    EXPECT(has(post(0, Beats::kMostBeats, 1), "no more fit") && has(post(16, 0, 1), "no more fit"));
    EXPECT(post(0, 0, 0).empty() && post(16, 0, 1).empty());
    EXPECT(posts.all().size() == Beats::kMostBeats);
    // A refusal costs little: late posts of all runs are looked for once in two seconds.
    Beats late(1ms);
    for (size_t i = 0; i < Beats::kMostBeats; ++i) {
        late.put("run" + std::to_string(i / Beats::kMostMembers), std::to_string(i), "x");
    }
    const auto refused = [&] { return refusal([&] { late.put("new", "a", "x"); }); };
    EXPECT(has(refused(), "no more fit"));
    late.pass_time();
    std::this_thread::sleep_for(5ms);
    late.pass_time();
    EXPECT(late.all().empty() && has(refused(), "no more fit"));
    for (int gap = 0; gap < 2; ++gap) {
        std::this_thread::sleep_for(1s);
        late.pass_time();
    }
    EXPECT(refused().empty() && late.all().size() == 1);
    Records records(true, {}, [] {});
    const auto swap = [&](size_t client) {
        records.swap(static_cast<int>(client), {"run", "", "x"});
    };
    for (size_t client = 0; client < Records::kMostWaiting; ++client) swap(client);
    EXPECT(has(refusal([&] { swap(9999); }), "too many swaps wait for the journal"));
}

}  // namespace

int main() {
    test_a_lost_answer_changes_nothing_twice();
    test_a_router_that_forgets_costs_one_silence();
    test_a_host_that_forgot_is_not_followed();
    test_a_restart_loses_keys_and_no_records();
    test_keys_of_any_kind_may_be_waited_for();
    test_waits_leave_the_connection_to_other_threads();
    test_many_clients_wait_for_one_key();
    test_strangers_keep_nobody_out();
    test_keys_decide();
    test_swaps_wait_for_the_journal();
    test_a_watch_ends_with_a_change();
    test_limits_are_sentences();
    test_a_look_brings_what_has_changed();
    test_a_post_is_for_the_host_alone();
    test_the_memory_of_beats_and_swaps_has_bounds();
    return passed("store");
}
