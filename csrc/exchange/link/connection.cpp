#include "exchange/link/connection.h"

#include <linux/tcp.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "exchange/link/life.h"

namespace diloco::link {
namespace {

// The most bytes that wait unsent in the kernel: an urgent frame waits behind them.
constexpr int kMostUnsent = 128 * 1024;

void set_option(int fd, int level, int name, int value) {
    setsockopt(fd, level, name, &value, sizeof(value));
}

// The result of a call of a TLS session, as Moved.
Moved moved_by(const TlsSession& session, TlsSession::Outcome outcome, size_t num_bytes) {
    Moved moved;
    moved.num_bytes = num_bytes;
    switch (outcome) {
        case TlsSession::Outcome::kDone:
            break;
        case TlsSession::Outcome::kWantsRead:
        case TlsSession::Outcome::kWantsWrite:
            moved.is_blocked = true;
            break;
        case TlsSession::Outcome::kClosed:
        case TlsSession::Outcome::kFailed: {
            moved.is_over = true;
            moved.trouble = session.trouble();
            // An empty `trouble` means that the peer has closed. A killed process sends no closing
            // alert, so a missing alert, too, says only that the peer has closed.
            if (moved.trouble == kPeerHasClosed || moved.trouble == kPeerHasVanished) {
                moved.trouble.clear();
            }
            break;
        }
    }
    return moved;
}

// The result of a system call, as Moved.
Moved moved_by(ssize_t result, int error) {
    Moved moved;
    if (result >= 0) {
        moved.num_bytes = static_cast<size_t>(result);
    } else if (error == EAGAIN) {
        moved.is_blocked = true;
    } else if (error != EINTR) {
        moved.is_over = true;
        if (!is_reset(error)) moved.trouble = std::strerror(error);
    }
    return moved;
}

}  // namespace

void set_options(int fd) {
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, kMostUnsent);
    set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 30);
    set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 30);
    set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 600 * 1000);
}

Moved Connection::transmit(const iovec* parts, int num_parts) const {
    if (session) {
        size_t done = 0;
        const TlsSession::Outcome outcome = session->write(parts, num_parts, done);
        return moved_by(*session, outcome, done);
    }
    msghdr head{};
    head.msg_iov = const_cast<iovec*>(parts);
    head.msg_iovlen = static_cast<size_t>(num_parts);
    const ssize_t written = sendmsg(fd.get(), &head, MSG_NOSIGNAL | MSG_DONTWAIT);
    return moved_by(written, errno);
}

Moved Connection::receive(const iovec* parts, int num_parts) const {
    if (session) {
        size_t done = 0;
        const TlsSession::Outcome outcome = session->read(parts, num_parts, done);
        return moved_by(*session, outcome, done);
    }
    const ssize_t got = readv(fd.get(), parts, num_parts);
    Moved moved = moved_by(got, errno);
    moved.is_over = moved.is_over || got == 0;
    return moved;
}

bool is_just_closed(const std::string& trouble) {
    return trouble == kHasClosed || trouble.rfind(kPeerHasClosed, 0) == 0;
}

std::string Connection::say(const void* data, size_t num_bytes) {
    const iovec part{const_cast<void*>(data), num_bytes};
    const Moved moved = transmit(&part, 1);
    has_unsent = session && moved.is_blocked;
    if (moved.num_bytes == num_bytes) return "";
    return moved.trouble.empty() ? kHasClosed : moved.trouble;
}

void Connection::say_bye() {
    if (!session || std::exchange(has_said_bye, true)) return;
    has_unsent = session->close() == TlsSession::Outcome::kWantsWrite;
}

void Connection::put(FrameKind kind) {
    constexpr size_t kMost = 1024;
    if (control.size() >= kMost) return;
    OutFrame out;
    out.frame.kind = static_cast<uint8_t>(kind);
    control.push_back(std::move(out));
}

int Connection::plan_write(iovec* parts, int most_parts, size_t most_bytes, bool with_bulk,
                           bool with_copies) {
    size_t planned = batch.empty() ? 0 : batch.front().size() - batch.front().done;
    const auto has_room = [&] {
        return planned < most_bytes && 2 * (static_cast<int>(batch.size()) + 1) <= most_parts;
    };
    const auto plan = [&](OutFrame&& frame) {
        planned += frame.size();
        batch.push_back(std::move(frame));
    };
    while (!control.empty() && has_room()) {
        plan(std::move(control.front()));
        control.pop_front();
    }
    while (control.empty() && !messages.empty() && has_room()) {
        plan(std::move(messages.front()));
        messages.pop_front();
    }
    const auto plan_all = [&](const std::deque<MessagePtr>& messages, FrameKind kind,
                              uint64_t fragment) {
        for (auto it = messages.begin(); it != messages.end() && has_room(); ++it) {
            Message& message = **it;
            if (message.is_cancelled) break;
            for (uint64_t next = message.moved; next < message.num_bytes && has_room();) {
                OutFrame part;
                part.frame.kind = static_cast<uint8_t>(kind);
                part.frame.token = message.token;
                part.frame.ticket = message.ticket;
                part.frame.number = message.number;
                part.frame.tag = message.tag;
                part.frame.offset = next;
                part.frame.total = message.num_bytes;
                part.frame.length =
                    static_cast<uint32_t>(std::min(fragment, message.num_bytes - next));
                part.payload = message.data + next;
                part.message = *it;
                next += part.frame.length;
                plan(std::move(part));
            }
        }
    };
    const bool is_urgent = !control.empty() || !messages.empty();
    if (!is_urgent && with_copies) {
        const size_t all = std::exchange(most_bytes, std::min(most_bytes, planned + 1));
        plan_all(short_copies, FrameKind::kCopy, kCopyBytes);
        plan_all(copies, FrameKind::kCopy, kCopyBytes);
        most_bytes = all;
    }
    if (!is_urgent && with_bulk) plan_all(bulk, FrameKind::kData, kFragmentBytes);
    int num_parts = 0;
    for (OutFrame& out : batch) {
        const size_t head = std::min(out.done, sizeof(Frame));
        const size_t body = out.done - head;
        if (head < sizeof(Frame)) {
            parts[num_parts++] = {reinterpret_cast<uint8_t*>(&out.frame) + head,
                                  sizeof(Frame) - head};
        }
        if (body < out.frame.length) {
            parts[num_parts++] = {const_cast<uint8_t*>(out.bytes()) + body,
                                  out.frame.length - body};
        }
        if (out.message) out.message->is_in_io = true;
    }
    return num_parts;
}

Connection::Written Connection::wrote(size_t num_bytes) {
    Written written;
    size_t num_complete = 0;
    for (OutFrame& out : batch) {
        if (out.message) out.message->is_in_io = false;
        const size_t step = std::min(num_bytes, out.size() - out.done);
        const bool begins = out.done == 0 && step > 0;
        const bool is_copy = out.frame.kind == static_cast<uint8_t>(FrameKind::kCopy);
        const bool is_bulk = out.frame.kind == static_cast<uint8_t>(FrameKind::kData) || is_copy;
        if (begins && is_bulk && out.message) {
            out.message->moved += out.frame.length;
            if (out.message->moved == out.message->num_bytes) {
                (is_copy ? copies_like(*out.message) : bulk).pop_front();
            }
        }
        if (is_bulk) (is_copy ? written.copy_bytes : written.round_bytes) += step;
        out.done += step;
        num_bytes -= step;
        if (out.done < out.size()) continue;
        ++num_complete;
        written.num_answered += out.ends_request ? 1 : 0;
        if (out.frame.kind == static_cast<uint8_t>(FrameKind::kTell)) {
            told_bytes -= out.frame.length + kTellCost;
        }
        const bool is_last =
            out.message && (!is_bulk || out.frame.offset + out.frame.length == out.frame.total);
        if (is_last) written.complete.push_back(out.message);
    }
    batch.erase(batch.begin(), batch.begin() + static_cast<std::ptrdiff_t>(num_complete));
    // Frames without a written byte return to their queues, so that a later control frame can
    // overtake fragments.
    while (!batch.empty() && batch.back().done == 0) {
        const auto kind = static_cast<FrameKind>(batch.back().frame.kind);
        if (kind != FrameKind::kData && kind != FrameKind::kCopy) {
            (kind == FrameKind::kTell ? messages : control).push_front(std::move(batch.back()));
        }
        batch.pop_back();
    }
    return written;
}

void Connection::withdraw(const MessagePtr& message) {
    bulk.erase(std::remove(bulk.begin(), bulk.end(), message), bulk.end());
    for (OutFrame& out : batch) {
        if (out.message != message) continue;
        if (out.copy.empty()) out.copy.assign(out.payload, out.payload + out.frame.length);
        out.message.reset();
    }
}

int Connection::plan_read(iovec* parts, uint8_t* scratch, size_t scratch_bytes) {
    if (target && (target->is_cancelled || target->is_done)) target.reset();
    if (begin == end) begin = end = 0;
    if (left == 0) {
        std::memmove(staging.data(), staging.data() + begin, num_staged());
        end -= std::exchange(begin, 0);
        parts[0] = {staging.data() + end, staging.size() - end};
        return 1;
    }
    if (target) {
        target->is_in_io = true;
        parts[0] = {target->data + target->moved, left};
    } else {
        parts[0] = {scratch, std::min<size_t>(left, scratch_bytes)};
        if (parts[0].iov_len < left) return 1;
    }
    parts[1] = {staging.data(), staging.size()};
    return 2;
}

bool Connection::took(size_t num_bytes) {
    const size_t step = std::min<size_t>(num_bytes, left);
    const bool was_left = left > 0;
    left -= step;
    if (target) target->moved += step;
    end += num_bytes - step;
    return was_left && left == 0;
}

bool Connection::take_staged() {
    const size_t step = std::min<size_t>(num_staged(), left);
    if (target && (target->is_cancelled || target->is_done)) target.reset();
    if (target) {
        std::memcpy(target->data + target->moved, staging.data() + begin, step);
        target->moved += step;
    }
    begin += step;
    left -= step;
    return step > 0 && left == 0;
}

}  // namespace diloco::link
