#include "exchange/store/store_client.h"

#include <c10/util/Exception.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "exchange/link/connection.h"

namespace diloco {
namespace {

using std::chrono::milliseconds;
using store::after;
using store::Answer;
using store::Channel;
using store::Clock;
using store::kForever;
using store::Packet;
using store::Request;

// The pause between two attempts to connect.
constexpr milliseconds kPause{100};
// kMostHandshake: the longest handshake; a server of another kind never ends one. kPatience: how
// long a host that accepts connections but does not answer is dialled again: it may be stopped,
// full or being started.
constexpr std::chrono::seconds kMostHandshake{10}, kPatience{30};
constexpr char kNoTls[] = "does not speak TLS as a store with keys does: ";
constexpr char kNoStore[] =
    "does not answer as a store of diloco_comm does (a TCPStore is given as an object, not by its "
    "address): ";
// How long a call dials again if nobody listens at the address any more.
constexpr milliseconds kRefused{1000};
// A long wait is sent as several requests, each at most as long as all before it together. Between
// them other callers get the connection, which carries one request at a time.
constexpr milliseconds kShortestPart{10}, kLongestPart{250};
// If a post cannot be written within this time, it is given up, and the connection closed.
constexpr milliseconds kPosted{1000};
// If no byte of an answer comes for a time between these two, the request, unless it is a swap, is
// repeated over a new connection.
constexpr milliseconds kLeastSilence{1000}, kMostSilence{20000};

// The host has refused this client, or speaks another protocol: another attempt would fail, too.
class Refused : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

Clock::time_point halfway(Clock::time_point end) { return Clock::now() + (end - Clock::now()) / 2; }

// Waits until the socket is ready for what the channel's outcome asks for. Throws
// std::runtime_error with one sentence if the connection has ended or `end` comes first, and
// Refused if TLS has failed.
void wait_for(const Channel& channel, Channel::Outcome outcome, Clock::time_point end) {
    if (outcome == Channel::Outcome::kFailed) throw Refused(channel.trouble());
    if (outcome == Channel::Outcome::kClosed) throw std::runtime_error(channel.trouble());
    const bool reads = outcome == Channel::Outcome::kWantsRead;
    pollfd one{channel.fd(), static_cast<short>(reads ? POLLIN : POLLOUT), 0};
    while (true) {
        // Poll even after `end`: this process may have been stopped, and the answer may be there.
        const auto left = std::chrono::ceil<milliseconds>(end - Clock::now()).count();
        // poll() takes an int of milliseconds, so a longer time needs several calls.
        const int ready =
            poll(&one, 1, static_cast<int>(std::clamp<int64_t>(left, 0, int64_t{1} << 30)));
        if (ready > 0) return;
        if (ready < 0 && errno != EINTR) throw std::runtime_error(std::strerror(errno));
        if (left <= 0) throw std::runtime_error("the other side did not answer in time");
    }
}

void shake_hands(Channel& channel, Clock::time_point end) {
    while (true) {
        const Channel::Outcome outcome = channel.handshake();
        if (outcome == Channel::Outcome::kDone) return;
        wait_for(channel, outcome, end);
    }
}

void send(Channel& channel, store::Outgoing packet, Clock::time_point end) {
    while (true) {
        const Channel::Outcome outcome = packet.write(channel);
        if (outcome == Channel::Outcome::kDone) return;
        wait_for(channel, outcome, end);
    }
}

// Receives a packet until `end`; throws if no byte comes for the time `silence`.
Packet receive(Channel& channel, Clock::time_point end, milliseconds silence) {
    store::Incoming packet;
    size_t num_bytes = 0;
    auto quiet = after(silence);
    while (true) {
        const Channel::Outcome outcome = packet.read(channel);
        if (outcome == Channel::Outcome::kDone) return packet.take(SIZE_MAX);
        if (packet.num_bytes() > std::exchange(num_bytes, packet.num_bytes())) {
            quiet = after(silence);
        }
        wait_for(channel, outcome, std::min(end, quiet));
    }
}

// Whether the first byte of a host is ZeroMQ's: registries of older versions spoke ZeroMQ.
bool speaks_zeromq(const Channel& channel, Clock::time_point end) {
    constexpr uint8_t kZeroMq = 0xff;
    wait_for(channel, Channel::Outcome::kWantsRead, end);
    uint8_t first = 0;
    return recv(channel.fd(), &first, 1, MSG_PEEK | MSG_DONTWAIT) == 1 && first == kZeroMq;
}

}  // namespace

// --------------------------------------------------------------------------------- connection

StoreClient::StoreClient(Place place, milliseconds timeout, const std::string& table_id,
                         bool connects)
    : Values(timeout), wire_(std::make_shared<Wire>()) {
    wire_->place = std::move(place);
    wire_->table_id = table_id;
    if (connects) connect(after(timeout_), Clock::time_point::max());
}

c10::intrusive_ptr<c10d::Store> StoreClient::clone() {
    auto copy = c10::make_intrusive<StoreClient>(wire_->place, timeout_, table_id(), false);
    copy->connect(after(own_limit()), Clock::time_point::max());
    return copy;
}

c10::intrusive_ptr<StoreClient> StoreClient::another(const std::string& id) {
    return c10::make_intrusive<StoreClient>(wire_->place, timeout_, id.empty() ? table_id() : id,
                                            false);
}

std::string StoreClient::table_id() const {
    const std::lock_guard<std::mutex> lock(wire_->mutex);
    return wire_->table_id;
}

StoreClient::Facts StoreClient::facts() const {
    const std::lock_guard<std::mutex> lock(wire_->mutex);
    return wire_->facts;
}

std::string StoreClient::name_of_host() const {
    return "the store at tcp://" + name_of_place(host(), std::to_string(port()));
}

void StoreClient::give_up(const std::string& why) {
    C10_THROW_ERROR(DistStoreError, name_of_host() + " " + why);
}

void StoreClient::lose(const std::string& why) {
    C10_THROW_ERROR(DistNetworkError, name_of_host() + " " + why);
}

// Dials and greets the host again and again until `end`, or until `refused_end` if nobody listens.
void StoreClient::connect(Clock::time_point end, Clock::time_point refused_end) {
    const auto begin = Clock::now();
    std::string trouble = "the host has no address";
    std::optional<Clock::time_point> patience;  // the end, once somebody has accepted a connection
    while (!wire_->channel) {
        Descriptor fd = dial_host(end, trouble);
        if (fd) {
            if (!patience) patience = std::min<Clock::time_point>(end, Clock::now() + kPatience);
            trouble = greet(std::move(fd), *patience);
        }
        if (wire_->channel) break;
        const auto next = Clock::now() + kPause;
        const bool is_refused = trouble == std::strerror(ECONNREFUSED);
        if (!patience && is_refused && next > refused_end)
            lose("is not there any more: " + trouble);
        if (next > patience.value_or(end)) {
            const auto waited = std::chrono::ceil<milliseconds>(end - begin);
            give_up(patience ? trouble
                             : "did not answer within " + std::to_string(waited.count()) +
                                   " ms: " + trouble);
        }
        std::this_thread::sleep_for(kPause);
    }
}

// Makes one attempt to dial the host. After a failure the descriptor is empty, and `trouble` says
// why.
Descriptor StoreClient::dial_host(Clock::time_point end, std::string& trouble) {
    const Place& place = wire_->place;
    const std::string port = std::to_string(place.port);
    Descriptor fd;
    if (place.proxy) {
        // Limit the attempt: a proxy may wait long for a host that is not there yet.
        end = std::min<Clock::time_point>(end, Clock::now() + kPatience);
        link::Dialled dialled = link::dial_through(*place.proxy, place.host, port, end);
        if (dialled.is_final) give_up("cannot be reached: " + dialled.trouble);
        trouble = dialled.trouble;
        return std::move(dialled.fd);
    }
    // Try the address of the last connection first, because a name server may be slow.
    if (wire_->address) fd = dial(*wire_->address, halfway(end), trouble);
    if (fd) return fd;
    const std::vector<Address> addresses = look_up(place.host, port, AI_NUMERICSERV);
    for (const Address& address : addresses) {
        fd = dial(address, &address == &addresses.back() ? end : halfway(end), trouble);
        if (!fd) continue;
        wire_->address = address;
        break;
    }
    return fd;
}

// Does the handshake and sends kHello. Returns an empty text, or the error if another attempt may
// succeed; throws if none can.
std::string StoreClient::greet(Descriptor fd, Clock::time_point end) {
    const Place& place = wire_->place;
    link::set_options(fd.get());
    end = std::min<Clock::time_point>(end, Clock::now() + kMostHandshake);
    link::PublicKey shown{};
    bool is_strange = false, has_shaken = false;
    const auto note_refusal = [&](bool is_refused) {
        const std::lock_guard<std::mutex> lock(wire_->mutex);
        wire_->facts.is_refused = is_refused;
    };
    const auto is_allowed = [&](const link::PublicKey& key) {
        shown = key;
        is_strange = key != place.identity->public_key() && place.allowed.count(key) == 0;
        return !is_strange;
    };
    note_refusal(false);
    try {
        auto channel = std::make_unique<Channel>(std::move(fd), place.identity, true, is_allowed);
        shake_hands(*channel, end);
        has_shaken = true;
        const Packet hello{
            static_cast<uint8_t>(Request::kHello), 0, {store::kProtocol, wire_->name}};
        send(*channel, store::Outgoing(hello), end);
        if (!channel->has_keys() && speaks_zeromq(*channel, end)) {
            give_up("is one of another version: it speaks ZeroMQ");
        }
        take_facts(receive(*channel, end, kMostHandshake));
        wire_->channel = std::move(channel);
        return "";
    } catch (const Refused& error) {
        note_refusal(is_strange || has_shaken);
        if (is_strange) {
            give_up("has the key " + link::to_hex(shown) +
                    ", which is not among the allowed keys of this process");
        }
        if (has_shaken) {
            give_up("does not let in the key of this process, " +
                    link::to_hex(place.identity->public_key()) + ": " + error.what());
        }
        give_up(kNoTls + std::string(error.what()));
    } catch (const c10::Error&) {
        throw;
    } catch (const std::exception& error) {
        const bool is_known = !facts().table_id.empty();
        return (is_known     ? "does not answer: "
                : has_shaken ? kNoStore
                             : kNoTls) +
               std::string(error.what());
    }
}

// Checks the host's answer to kHello, and keeps the facts in it.
void StoreClient::take_facts(const Packet& hello) {
    const auto& parts = hello.parts;
    if (hello.kind == static_cast<uint8_t>(Answer::kFailed) && !parts.empty()) give_up(parts[0]);
    if (hello.kind != static_cast<uint8_t>(Answer::kDone) || parts.empty()) {
        throw std::runtime_error("the other side knows no hello");
    }
    if (parts.size() < 3 || parts[0] != store::kProtocol) {
        give_up("is one of another version: it speaks \"" + parts[0] + "\", and this process \"" +
                store::kProtocol + "\"");
    }
    std::string expected;
    {
        const std::lock_guard<std::mutex> lock(wire_->mutex);
        wire_->facts.table_id = parts[1];
        wire_->facts.process = parts[2];
        wire_->facts.is_durable = hello.number != 0;
        wire_->facts.takes_posts = parts.size() > 3 && parts[3] == store::kPosts;
        if (wire_->table_id.empty()) wire_->table_id = parts[1];
        expected = wire_->table_id;
    }
    if (parts[1] != expected) {
        lose("was started again and has forgotten everything, or is another one: its table is " +
             parts[1] + ", and this process has used the table " + expected);
    }
}

// ---------------------------------------------------------------------------------- questions

std::shared_ptr<void> StoreClient::take_turn(Clock::time_point end) {
    std::unique_lock<std::mutex> lock(wire_->mutex);
    if (!wire_->turn_ends.wait_until(lock, end, [&] { return !wire_->has_turn; })) return nullptr;
    wire_->has_turn = true;
    return {wire_.get(), [wire = wire_](void*) {
                const std::lock_guard<std::mutex> again(wire->mutex);
                wire->has_turn = false;
                wire->turn_ends.notify_one();
            }};
}

// Throws if the host was started again since this client has first used values there: they are only
// in the memory of the host's process, even if its records are in a journal.
void StoreClient::check_memory() {
    std::string process;
    {
        const std::lock_guard<std::mutex> lock(wire_->mutex);
        if (wire_->process.empty()) wire_->process = wire_->facts.process;
        if (wire_->process == wire_->facts.process) return;
    }
    lose("was started again and has forgotten its keys");
}

Packet StoreClient::ask(Question question, milliseconds limit) {
    Wire& wire = *wire_;
    if (getpid() != wire.owner) {
        give_up("is connected to the parent of this process: a forked child connects anew");
    }
    const auto end = after(limit);
    const std::shared_ptr<void> turn = take_turn(end);
    if (!turn) {
        give_up("is asked by another thread for " + std::to_string(limit.count()) + " ms");
    }
    if (question.parts.size() > Packet::kMostParts) {
        C10_THROW_ERROR(DistStoreError, "a store takes at most " +
                                            std::to_string(Packet::kMostParts) +
                                            " keys and values at a time, got " +
                                            std::to_string(question.parts.size()));
    }
    const bool is_swap = question.request == Request::kSwap;
    const bool is_of_record = is_swap || question.request == Request::kRead ||
                              question.request == Request::kBeat ||
                              question.request == Request::kWatch;
    if (store::changes_values(question.request)) {
        question.parts.push_back(std::to_string(++wire.last_number));
    }
    std::optional<store::Outgoing> bytes;
    try {
        bytes = store::Outgoing(
            {static_cast<uint8_t>(question.request), question.number, question.parts});
    } catch (const std::invalid_argument& error) {
        C10_THROW_ERROR(DistStoreError, error.what());
    }
    // While a host waits for keys or a record, it sends nothing; add that time below.
    milliseconds silence =
        std::clamp<milliseconds>(std::min(limit, own_limit()) / 3, kLeastSilence, kMostSilence);
    const bool waits = question.request == Request::kGet || question.request == Request::kWait ||
                       question.request == Request::kWatch;
    if (waits) silence += milliseconds(question.number);
    Packet answer;
    while (true) {
        if (wire.channel && wire.channel->is_over()) wire.channel.reset();
        if (!wire.channel) connect(end, std::min(end, after(kRefused)));
        if (!is_of_record) check_memory();
        try {
            send(*wire.channel, *bytes, end);
            answer = receive(*wire.channel, end, is_swap ? limit : silence);
            break;
        } catch (const std::exception& error) {
            wire.channel.reset();
            if (is_swap || Clock::now() >= end) {
                C10_THROW_ERROR(DistStoreError, "the connection to " + name_of_host() +
                                                    " has broken: " + error.what());
            }
        }
    }
    if (answer.kind == static_cast<uint8_t>(Answer::kFailed)) {
        C10_THROW_ERROR(DistStoreError,
                        answer.parts.empty() ? "the store gives no reason" : answer.parts.front());
    }
    return answer;
}

template <typename IsThere>
Packet StoreClient::ask_until(Question question, milliseconds time, IsThere is_there) {
    const auto begin = Clock::now(), end = after(time);
    while (true) {
        const auto now = Clock::now();
        const auto left = std::max(std::chrono::ceil<milliseconds>(end - now), milliseconds(0));
        const auto waited = std::chrono::ceil<milliseconds>(now - begin);
        question.number = std::min(left, std::clamp(waited, kShortestPart, kLongestPart)).count();
        Packet answer = ask(question, left + own_limit());
        if (is_there(answer) || Clock::now() >= end) return answer;
        // Let other callers of this client use the connection.
        std::this_thread::sleep_for(milliseconds(1));
    }
}

Packet StoreClient::wait_for(Request request, const store::Keys& keys, milliseconds time) {
    const auto is_late = [](const Packet& answer) {
        return answer.kind == static_cast<uint8_t>(Answer::kLate);
    };
    Packet answer =
        ask_until({request, keys}, time, [&](const Packet& each) { return !is_late(each); });
    if (is_late(answer)) {
        C10_THROW_ERROR(DistStoreError, store::words_of_late(keys, time.count()));
    }
    return answer;
}

// ------------------------------------------------------------------------------ runs' records

namespace {

StoreClient::Record record_in(const Packet& answer) {
    return {answer.parts.at(0), std::stoull(answer.parts.at(1))};
}

}  // namespace

StoreClient::Record StoreClient::read_record(const std::string& run, milliseconds limit) {
    return record_in(ask({Request::kRead, {run}}, limit));
}

bool StoreClient::swap_record(const std::string& run, const std::string& old,
                              const std::string& next, milliseconds limit) {
    return ask({Request::kSwap, {run, old, next}}, limit).number != 0;
}

std::vector<StoreClient::Beat> StoreClient::beat(const std::string& run, const std::string& member,
                                                 const std::string& text, milliseconds limit) {
    return look(run, member, text, 0, 0, limit).beats;
}

StoreClient::Look StoreClient::look(const std::string& run, const std::string& member,
                                    const std::string& text, uint64_t version, uint64_t revision,
                                    milliseconds limit) {
    const store::Keys known{run, member, text, std::to_string(version), std::to_string(revision)};
    const Packet answer = ask({Request::kBeat, known}, limit);
    const store::Keys& parts = answer.parts;
    Look look;
    look.version = static_cast<uint64_t>(answer.number);
    std::tie(look.record, look.revision) = record_in(answer);
    look.counts = parts.at(2);
    look.is_whole = !parts.at(3).empty();
    for (size_t i = 4; i + 2 < parts.size(); i += 3) {
        look.beats.emplace_back(parts[i], parts[i + 1], std::stod(parts[i + 2]) / 1000.0);
    }
    return look;
}

bool StoreClient::post(const std::string& run, const std::string& member, const std::string& text) {
    if (getpid() != wire_->owner || !facts().takes_posts) return false;
    const auto end = after(kPosted);
    const std::shared_ptr<void> turn = take_turn(end);
    auto& channel = wire_->channel;
    if (!turn || !channel || channel->is_over()) return false;
    const Packet packet{static_cast<uint8_t>(Request::kPost), 0, {run, member, text}};
    try {
        send(*channel, store::Outgoing(packet), end);
    } catch (const std::exception&) {
        channel.reset();
        return false;
    }
    return true;
}

StoreClient::Record StoreClient::watch_record(const std::string& run, uint64_t revision,
                                              milliseconds time) {
    const Question question{Request::kWatch, {run, std::to_string(revision)}};
    return record_in(ask_until(question, time, [revision](const Packet& answer) {
        return record_in(answer).second != revision;
    }));
}

}  // namespace diloco
