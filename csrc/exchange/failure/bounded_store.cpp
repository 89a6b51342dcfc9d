#include "exchange/failure/bounded_store.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "exchange/store/channel.h"
#include "exchange/store/store_client.h"
#include "exchange/store/store_host.h"

namespace diloco {
namespace {

using std::chrono::milliseconds;
using Counter = std::shared_ptr<std::atomic<int>>;

struct Call {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_done = false;
    bool is_left_behind = false;
    std::exception_ptr error;
};

// Waits up to `limit` for the end of `call`. A machine that stands still for a while (suspended, or
// out of its share of a processor) costs one slice of the limit, however long it was.
bool is_done_within(milliseconds limit, Call& call, std::unique_lock<std::mutex>& lock) {
    constexpr int kSlices = 10;
    for (int slice = 0; slice < kSlices; ++slice) {
        if (call.changed.wait_for(lock, limit / kSlices, [&] { return call.is_done; })) return true;
    }
    return false;
}

// Runs `body` on a thread of its own, and rethrows its exception. Returns false past `limit`: then
// the thread is left behind, and is counted in `num_late` until the body ends.
bool run_within(milliseconds limit, const Counter& num_late, std::function<void()> body) {
    const auto call = std::make_shared<Call>();
    std::thread thread([call, num_late, body = std::move(body)] {
        pthread_setname_np(pthread_self(), "diloco-store");
        std::exception_ptr error;
        try {
            body();
        } catch (...) {
            error = std::current_exception();
        }
        std::lock_guard<std::mutex> lock(call->mutex);
        call->error = std::move(error);
        call->is_done = true;
        if (call->is_left_behind) --*num_late;
        call->changed.notify_all();
    });
    std::unique_lock<std::mutex> lock(call->mutex);
    if (!is_done_within(limit, *call, lock)) {
        call->is_left_behind = true;
        ++*num_late;
        thread.detach();
        return false;
    }
    lock.unlock();
    thread.join();
    if (call->error) std::rethrow_exception(call->error);
    return true;
}

// While one exists, torch logs no warnings, in any thread: no level of a thread alone exists.
// TCPStore logs the end of its host with a C++ stack, also where the host has ended as it should,
// and throws the same text. A level that the program sets meanwhile stays.
class WithoutWarnings {
  public:
    WithoutWarnings() {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (count_++ > 0) return;
        level_ = __atomic_load_n(&FLAGS_caffe2_log_level, __ATOMIC_RELAXED);
        if (level_ < kErrors) __atomic_store_n(&FLAGS_caffe2_log_level, kErrors, __ATOMIC_RELAXED);
    }

    ~WithoutWarnings() {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (--count_ > 0 || level_ >= kErrors) return;
        int expected = kErrors;
        __atomic_compare_exchange_n(&FLAGS_caffe2_log_level, &expected, level_, false,
                                    __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }

    WithoutWarnings(const WithoutWarnings&) = delete;
    WithoutWarnings& operator=(const WithoutWarnings&) = delete;

  private:
    static constexpr int kErrors = 2;  // of glog's levels
    static inline std::mutex mutex_;
    static inline int count_ = 0;
    static inline int level_ = 0;
};

struct Prefix : c10d::PrefixStore {
    static const std::string& of(const PrefixStore& store) { return store.*&Prefix::prefix_; }
};

template <typename Store>
auto clone_of(Store& store, int) -> decltype(store.clone()) {
    return store.clone();
}

// Before torch 2.8 stores have no clone(): a new connection to a TCPStore, below its prefixes.
template <typename Store>
c10::intrusive_ptr<Store> clone_of(Store& store, long) {
    if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(&store)) {
        return c10::make_intrusive<c10d::PrefixStore>(Prefix::of(*prefixed),
                                                      clone_of(*prefixed->getUnderlyingStore(), 0));
    }
    if (auto* client = dynamic_cast<StoreClient*>(&store)) return client->clone();
    const auto* tcp = dynamic_cast<const c10d::TCPStore*>(&store);
    if (!tcp)
        C10_THROW_ERROR(DistStoreError, "only a TCPStore and a client of a store have connections");
    return connect_store(tcp->getHost(), tcp->getPort(), store.getTimeout());
}

// The store below all prefixes.
c10d::Store& bottom_of(c10d::Store& store) {
    auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(&store);
    return prefixed ? bottom_of(*prefixed->getUnderlyingStore()) : store;
}

template <typename Store>
auto keys_of(Store& store, int) -> decltype(store.listKeys()) {
    return store.listKeys();
}

template <typename Store>
std::vector<std::string> keys_of(Store&, long) {
    return {};
}

}  // namespace

c10::intrusive_ptr<c10d::Store> connect_store(const std::string& host, uint16_t port,
                                              milliseconds timeout) {
    // The constructor's timeout covers the connection, but not a host that hangs after that; its
    // own error says more, so it goes first.
    constexpr milliseconds kSlack{1000};
    const auto store = std::make_shared<c10::intrusive_ptr<c10d::Store>>();
    const bool is_made = run_within(timeout + kSlack, std::make_shared<std::atomic<int>>(0),
                                    [store, host, port, timeout] {
                                        c10d::TCPStoreOptions options;
                                        options.port = port;
                                        options.timeout = timeout;
                                        *store = c10::make_intrusive<c10d::TCPStore>(host, options);
                                    });
    if (!is_made) {
        C10_THROW_ERROR(DistStoreError, "no store answered at " + host + ":" +
                                            std::to_string(port) + " within " +
                                            std::to_string((timeout + kSlack).count()) + " ms");
    }
    return std::move(*store);
}

c10::intrusive_ptr<c10d::Store> bounded(c10::intrusive_ptr<c10d::Store> store, milliseconds limit) {
    c10d::Store& bottom = bottom_of(*store);
    if (dynamic_cast<StoreHost*>(&bottom)) return store;
    if (!dynamic_cast<StoreClient*>(&bottom)) {
        return c10::make_intrusive<BoundedStore>(std::move(store), limit);
    }
    if (auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
        return c10::make_intrusive<c10d::PrefixStore>(
            Prefix::of(*prefixed), bounded(prefixed->getUnderlyingStore(), limit));
    }
    return dynamic_cast<StoreClient&>(*store).with_limit(limit);
}

bool is_lost(c10d::Store& store) {
    c10d::Store& bottom = bottom_of(store);
    if (const auto* client = dynamic_cast<StoreClient*>(&bottom)) return client->is_lost();
    const auto* bounded = dynamic_cast<BoundedStore*>(&bottom);
    return bounded && bounded->is_broken();
}

c10::intrusive_ptr<c10d::Store> another_connection(c10d::Store& store) {
    return clone_of(store, 0);
}

BoundedStore::BoundedStore(c10::intrusive_ptr<c10d::Store> store, milliseconds limit)
    : Store(store->getTimeout()),
      store_(std::move(store)),
      limit_(limit),
      is_broken_(std::make_shared<std::atomic<bool>>(false)),
      num_unanswered_(std::make_shared<std::atomic<int>>(0)) {}

void BoundedStore::ask(milliseconds limit, std::function<void(Store&)> body) const {
    if (*num_unanswered_ > 0) C10_THROW_ERROR(DistStoreError, "the store still does not answer");
    const bool is_answered = run_within(limit, num_unanswered_,
                                        [store = store_, body = std::move(body)] { body(*store); });
    if (!is_answered) {
        C10_THROW_ERROR(DistStoreError,
                        "the store did not answer within " + std::to_string(limit.count()) + " ms");
    }
}

void BoundedStore::run(std::function<void(Store&)> body) const {
    if (*is_broken_) C10_THROW_ERROR(DistNetworkError, "the connection to the store has broken");
    const WithoutWarnings quiet;
    ask(limit_, [is_broken = is_broken_, body = std::move(body)](Store& store) {
        try {
            body(store);
        } catch (const c10::DistNetworkError&) {
            *is_broken = true;
            throw;
        }
    });
}

template <typename Body>
auto BoundedStore::call(Body body) const {
    // Shared with the thread, which may write the result when no caller waits any more.
    const auto result = std::make_shared<decltype(body(*store_))>();
    run([result, body = std::move(body)](Store& store) { *result = body(store); });
    return std::move(*result);
}

c10::intrusive_ptr<c10d::Store> BoundedStore::clone() {
    // The present connection may be sound where a new one cannot be made.
    const auto copy = std::make_shared<c10::intrusive_ptr<Store>>();
    ask(std::max(timeout_, limit_), [copy](Store& store) { *copy = clone_of(store, 0); });
    return c10::make_intrusive<BoundedStore>(std::move(*copy), limit_);
}

void BoundedStore::set(const std::string& key, const Bytes& value) {
    run([key, value](Store& store) { store.set(key, value); });
}

BoundedStore::Bytes BoundedStore::compareSet(const std::string& key, const Bytes& expected,
                                             const Bytes& desired) {
    return call([key, expected, desired](Store& store) {
        return store.compareSet(key, expected, desired);
    });
}

BoundedStore::Bytes BoundedStore::get(const std::string& key) {
    return call([key](Store& store) { return store.get(key); });
}

int64_t BoundedStore::add(const std::string& key, int64_t value) {
    return call([key, value](Store& store) { return store.add(key, value); });
}

bool BoundedStore::deleteKey(const std::string& key) {
    return call([key](Store& store) { return store.deleteKey(key); });
}

bool BoundedStore::check(const std::vector<std::string>& keys) {
    return call([keys](Store& store) { return store.check(keys); });
}

int64_t BoundedStore::getNumKeys() {
    return call([](Store& store) { return store.getNumKeys(); });
}

void BoundedStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void BoundedStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
    constexpr milliseconds kShortest{1}, kLongest{20};
    const auto end = std::chrono::steady_clock::now() + timeout;
    for (milliseconds pause = kShortest; !check(keys); pause = std::min(2 * pause, kLongest)) {
        if (std::chrono::steady_clock::now() >= end) {
            C10_THROW_ERROR(DistStoreError, store::words_of_late(keys, timeout.count()));
        }
        std::this_thread::sleep_for(pause);
    }
}

void BoundedStore::append(const std::string& key, const Bytes& value) {
    run([key, value](Store& store) { store.append(key, value); });
}

std::vector<BoundedStore::Bytes> BoundedStore::multiGet(const std::vector<std::string>& keys) {
    return call([keys](Store& store) { return store.multiGet(keys); });
}

std::vector<std::string> BoundedStore::listKeys() {
    return call([](Store& store) { return keys_of(store, 0); });
}

void BoundedStore::multiSet(const std::vector<std::string>& keys,
                            const std::vector<Bytes>& values) {
    run([keys, values](Store& store) { store.multiSet(keys, values); });
}

}  // namespace diloco
