// Calls on a store whose host hangs end in time, fail at once from then on, and work again later.
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "exchange/failure/bounded_store.h"
#include "hanging_store.h"

using namespace std::chrono_literals;
using diloco::BoundedStore;
using diloco_test::HangingStore;
using diloco_test::LocalStore;

namespace {

const BoundedStore::Bytes kValue{1, 2, 3};

bool is_refused(const std::function<void()>& call) {
    try {
        call();
    } catch (const c10::DistStoreError&) {
        return true;
    }
    return false;
}

void test_values_pass_through() {
    BoundedStore store(c10::make_intrusive<HangingStore>(), 60s);
    store.set("key", kValue);
    EXPECT(store.check({"key"}) && !store.check({"key", "other"}));
    EXPECT(store.get("key") == kValue);
}

void test_comparisons_pass_through() {
    const BoundedStore::Bytes other{4};
    BoundedStore store(c10::make_intrusive<HangingStore>(), 60s);
    EXPECT(store.compareSet("key", other, kValue) == other && !store.check({"key"}));
    EXPECT(store.compareSet("key", {}, kValue) == kValue);
    EXPECT(store.compareSet("key", {}, other) == kValue);
    EXPECT(store.compareSet("key", kValue, other) == other);
    store.multiSet({"a", "b"}, {kValue, other});
    EXPECT(store.multiGet({"b", "a"}) == (std::vector<BoundedStore::Bytes>{other, kValue}));
    EXPECT(!store.hasExtendedApi());
}

void test_exceptions_pass_through() {
    BoundedStore store(c10::make_intrusive<HangingStore>(), 60s);
    bool is_thrown = false;
    try {
        store.get("nothing");
    } catch (const std::out_of_range&) {
        is_thrown = true;
    }
    EXPECT(is_thrown);
    EXPECT(!store.check({"nothing"}));
}

void test_host_that_hangs() {
    const auto host = c10::make_intrusive<HangingStore>();
    {
        BoundedStore store(host, 50ms);
        host->hang();
        EXPECT(is_refused([&] { store.set("key", kValue); }));
        // Nobody waits a second time: with its limit, this would.
        BoundedStore patient(host, 50ms);
        EXPECT(is_refused([&] { patient.check({"key"}); }));
        EXPECT(is_refused([&] { patient.compareSet("key", {}, kValue); }));
        for (int i = 0; i < 1000; ++i) EXPECT(is_refused([&] { patient.check({"key"}); }));
        // The threads of the two calls may still be on their way to the host.
        for (int i = 0; i < 3000 && host->num_waiting() < 2; ++i) {
            std::this_thread::sleep_for(10ms);
        }
        EXPECT(host->num_waiting() == 2);
    }
    // The calls that were left behind outlive their stores.
    host->wake();
    BoundedStore store(host, 60s);
    while (!store.check({"key"})) std::this_thread::yield();
    EXPECT(store.get("key") == kValue);
}

void test_host_that_wakes_up() {
    const auto host = c10::make_intrusive<HangingStore>();
    BoundedStore store(host, 50ms);
    host->hang();
    EXPECT(is_refused([&] { store.set("key", kValue); }));
    host->wake();
    while (is_refused([&] { store.check({"key"}); })) std::this_thread::yield();
    while (!store.check({"key"})) std::this_thread::yield();
}

// The store's own wait is of no use: TCPStore's holds all other calls up.
void test_wait_lets_others_set_the_key() {
    const auto host = c10::make_intrusive<HangingStore>();
    BoundedStore store(host, 60s), other(host, 60s);
    std::thread late([&] {
        std::this_thread::sleep_for(50ms);
        other.set("late", kValue);
    });
    store.wait({"late"}, 60s);
    late.join();
    EXPECT(store.get("late") == kValue);
    EXPECT(is_refused([&] { store.wait({"late", "never"}, 50ms); }));
    host->hang();
    BoundedStore hasty(host, 50ms);
    EXPECT(is_refused([&] { hasty.wait({"late"}, 60s); }));
    host->wake();
}

class BrokenStore : public LocalStore {
  public:
    bool check(const std::vector<std::string>&) override {
        ++num_checks;
        C10_THROW_ERROR(DistNetworkError, "broken pipe");
    }
    int num_checks = 0;
};

void test_connection_that_breaks() {
    const auto host = c10::make_intrusive<BrokenStore>();
    BoundedStore store(host, 60s);
    store.set("key", kValue);
    EXPECT(!store.is_broken());
    for (int i = 0; i < 3; ++i) {
        bool is_thrown = false;
        try {
            store.check({"key"});
        } catch (const c10::DistNetworkError&) {
            is_thrown = true;
        }
        EXPECT(is_thrown && store.is_broken());
    }
    // The store is asked once, and for nothing else either.
    EXPECT(host->num_checks == 1);
    bool is_thrown = false;
    try {
        store.get("key");
    } catch (const c10::DistNetworkError&) {
        is_thrown = true;
    }
    EXPECT(is_thrown);
}

// Calls see the level of torch's log; `change` runs in them, as in another thread of the program.
class LookingStore : public LocalStore {
  public:
    bool check(const std::vector<std::string>&) override { return look(); }
    int level = -1;
    std::function<void()> change = [] {};

  private:
    bool look() {
        level = FLAGS_caffe2_log_level;
        change();
        return true;
    }
};

void test_warnings_are_held_back_in_calls_alone() {
    constexpr int kErrors = 2;
    const int before = FLAGS_caffe2_log_level;
    const auto host = c10::make_intrusive<LookingStore>();
    BoundedStore store(host, 60s);
    store.check({"key"});
    EXPECT(host->level == std::max(before, kErrors) && FLAGS_caffe2_log_level == before);
    host->change = [] { FLAGS_caffe2_log_level = 3; };
    store.check({"key"});
    EXPECT(FLAGS_caffe2_log_level == 3);
    store.check({"key"});
    EXPECT(host->level == 3 && FLAGS_caffe2_log_level == 3);
    FLAGS_caffe2_log_level = before;
}

}  // namespace

int main() {
    test_values_pass_through();
    test_comparisons_pass_through();
    test_exceptions_pass_through();
    test_host_that_hangs();
    test_host_that_wakes_up();
    test_wait_lets_others_set_the_key();
    test_connection_that_breaks();
    test_warnings_are_held_back_in_calls_alone();
    return passed("bounded store");
}
