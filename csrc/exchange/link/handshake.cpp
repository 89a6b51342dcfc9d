// The TLS handshakes of a link with a key. They run on a thread of their own: one handshake takes
// as long to compute as many messages, and strangers can ask for any number of them.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "exchange/link/link.h"

namespace diloco {

using Outcome = link::TlsSession::Outcome;
using State = link::Connection::State;

void Link::allow(std::set<link::PublicKey> keys) {
    check_process();
    if (!identity_) throw std::invalid_argument("this link has no key, and so allows no keys");
    allowed_->replace(std::move(keys));
    const Lock lock(mutex_);
    has_new_keys_ = true;
    wake();
}

// Closes connections whose peer's key is not allowed any more. For handshakes that are not over,
// on_secure() decides.
void Link::end_removed_keys(Lock& lock) {
    for (const auto& [id, connection] : std::unordered_map(connections_)) {
        if (!connection->has_shaken || allowed_->has(connection->session->peer())) continue;
        refuse_removed(lock, connection);
    }
}

void Link::refuse_removed(Lock& lock, const ConnectionPtr& connection) {
    const std::string why =
        "its key is not allowed any more: " + link::to_hex(connection->session->peer());
    if (connection->state == State::kOpen) return disconnect(lock, connection, why);
    refuse(lock, connection, why);
}

// ------------------------------------------------------------------------- the link's own thread

// Called when a connection in State::kSecuring is ready, or its handshake has made a step.
void Link::secure(Lock& lock, const ConnectionPtr& connection) {
    link::Connection& it = *connection;
    if (!it.trouble.empty()) {
        const bool is_worth_a_word = it.dial || !it.has_left;
        return refuse(lock, connection, is_worth_a_word ? std::string(it.trouble) : "");
    }
    if (it.has_shaken) return on_secure(lock, connection);
    if (it.is_shaking) return;
    if (!it.has_heard && !hear(lock, connection)) return;
    queue_shake(connection);
}

// Looks at the peer's first byte, so that a peer which does not speak TLS costs no handshake, and a
// link without keys can be told of the keys. Returns whether the handshake may go on.
bool Link::hear(Lock& lock, const ConnectionPtr& connection) {
    link::Connection& it = *connection;
    uint8_t first = 0;
    const ssize_t got = recv(it.fd.get(), &first, 1, MSG_PEEK | MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) {
        it.can_read = false;
        return false;
    }
    if (got <= 0) {
        const bool is_closed = got == 0 || is_reset(errno);
        const char* const why = is_closed ? link::kHasClosed : std::strerror(errno);
        refuse(lock, connection, it.dial ? why : "");
        return false;
    }
    it.has_heard = true;
    strangers_.hear(it.id);
    if (first == link::kTlsHandshake || (it.dial && first == link::kTlsAlert)) return true;
    const bool is_link = first == link::kGreeting[0];
    if (it.dial) {
        refuse(lock, connection,
               is_link ? "the link there has no keys, and this link has keys"
                       : "another program answers there");
    } else if (is_link) {
        it.state = State::kAsked;
        greet(lock, connection);
    } else {
        refuse_stranger(lock, connection);
    }
    return false;
}

void Link::queue_shake(const ConnectionPtr& connection) {
    connection->is_shaking = true;
    if (connection->dial) {
        shakes_.push_front(connection);
    } else {
        shakes_.push_back(connection);
    }
    shake_due_.notify_one();
}

// Called when both sides have proven their keys: checks the key, and goes on with the greeting.
void Link::on_secure(Lock& lock, const ConnectionPtr& connection) {
    link::Connection& it = *connection;
    const link::PublicKey& key = it.session->peer();
    if (!allowed_->has(key)) return refuse_removed(lock, connection);
    if (!it.dial) {
        it.state = State::kAsked;
        return greet(lock, connection);
    }
    if (key != it.peer->id.second) {
        return refuse(lock, connection,
                      "the process there has the key " + link::to_hex(key) + ", and not " +
                          link::to_hex(it.peer->id.second));
    }
    ask(lock, connection);
    if (it.state == State::kAsking) greet(lock, connection);
}

// -------------------------------------------------------------------------- the other thread

void Link::shake_hands() {
    Lock lock(mutex_);
    while (true) {
        shake_due_.wait(lock, [&] { return is_closing_ || !shakes_.empty(); });
        if (is_closing_) break;
        const ConnectionPtr connection = shakes_.front();
        shakes_.pop_front();
        if (connection->state == State::kSecuring) shake(lock, connection);
    }
    shakes_.clear();
}

// Does one step of a handshake, without the lock.
void Link::shake(Lock& lock, const ConnectionPtr& connection) {
    link::Connection& it = *connection;
    const bool is_dialler = it.dial != nullptr;
    std::shared_ptr<link::TlsSession> session = it.session;
    // Clear the flags before the step, so that an event during the step sets them again.
    it.can_read = it.can_write = false;
    lock.unlock();
    Outcome outcome = Outcome::kFailed;
    std::string trouble;
    try {
        if (!session) {
            const auto is_allowed = [allowed = allowed_](const link::PublicKey& key) {
                return allowed->has(key);
            };
            session =
                std::make_shared<link::TlsSession>(identity_, it.fd.get(), is_dialler, is_allowed);
        }
        outcome = session->handshake();
        trouble = session->trouble();
    } catch (const std::exception& error) {
        trouble = error.what();
    }
    lock.lock();
    it.session = session;
    it.is_shaking = false;
    if (it.state != State::kSecuring) return;
    switch (outcome) {
        case Outcome::kWantsRead:
            if (!it.can_read) return;
            break;
        case Outcome::kWantsWrite:
            if (!it.can_write) return;
            break;
        case Outcome::kDone:
            it.has_shaken = true;
            // The session may hold the peer's next bytes, for which epoll reports no event.
            it.can_read = it.can_write = true;
            break;
        case Outcome::kClosed:
        case Outcome::kFailed:
            it.has_left = outcome == Outcome::kClosed;
            it.trouble = trouble.empty() ? "TLS failed" : trouble;
            break;
    }
    mark_ready(connection);
}

}  // namespace diloco
