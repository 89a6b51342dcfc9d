#include "exchange/store/store_host.h"

#include <c10/util/Exception.h>

#include <utility>

#include "exchange/store/store_server.h"

namespace diloco {

using store::bytes_of;
using store::Keys;
using store::text_of;

StoreHost::StoreHost(Options options)
    : Store(options.timeout),
      server_(std::make_shared<Server>(std::move(options))),
      thread_([server = server_] { server->run(); }) {}

StoreHost::~StoreHost() { close(); }

void StoreHost::close() {
    const std::lock_guard<std::mutex> turn(closing_);
    if (!thread_.joinable()) return;
    if (getpid() != process_) {
        // The thread is the parent's; a child of fork() has none to wait for.
        thread_.detach();
        return;
    }
    server_->stop();
    thread_.join();
}

void StoreHost::allow(PublicKeys keys, PublicKeys readers) {
    server_->allow(std::move(keys), std::move(readers));
}

int64_t StoreHost::num_clients() const { return server_->num_clients(); }

const std::string& StoreHost::table_id() const { return server_->table_id; }

std::vector<store::Change> StoreHost::take_changes(milliseconds time) {
    return server_->records.take(time);
}

void StoreHost::settle(const std::string& sentence, bool is_doubtful) {
    server_->records.settle(sentence, is_doubtful);
}

// ------------------------------------------------------------------- the store of this process

c10::intrusive_ptr<c10d::Store> StoreHost::clone() {
    return c10::intrusive_ptr<c10d::Store>::unsafe_reclaim_from_nonowning(this);
}

void StoreHost::set(const std::string& key, const Bytes& value) {
    server_->table.set({key, text_of(value)});
}

StoreHost::Bytes StoreHost::compareSet(const std::string& key, const Bytes& expected,
                                       const Bytes& desired) {
    return bytes_of(server_->table.compare_set(key, text_of(expected), text_of(desired)));
}

Keys StoreHost::wait_for(const Keys& keys, milliseconds timeout) {
    auto values = server_->table.wait(keys, store::after(timeout));
    if (!values) {
        C10_THROW_ERROR(DistStoreError, store::words_of_late(keys, timeout.count()));
    }
    return std::move(*values);
}

StoreHost::Bytes StoreHost::get(const std::string& key) {
    return bytes_of(wait_for({key}, timeout_).front());
}

int64_t StoreHost::add(const std::string& key, int64_t value) {
    return server_->table.add(key, value);
}

bool StoreHost::deleteKey(const std::string& key) { return server_->table.remove(key); }

bool StoreHost::check(const std::vector<std::string>& keys) { return server_->table.has(keys); }

int64_t StoreHost::getNumKeys() { return static_cast<int64_t>(listKeys().size()); }

void StoreHost::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void StoreHost::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
    wait_for(keys, timeout);
}

void StoreHost::append(const std::string& key, const Bytes& value) {
    server_->table.append(key, text_of(value));
}

std::vector<StoreHost::Bytes> StoreHost::multiGet(const std::vector<std::string>& keys) {
    std::vector<Bytes> values;
    for (const std::string& text : wait_for(keys, timeout_)) values.push_back(bytes_of(text));
    return values;
}

void StoreHost::multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) {
    server_->table.set(store::pairs_of(keys, values));
}

std::vector<std::string> StoreHost::listKeys() { return server_->table.list(); }

}  // namespace diloco
