// Link::connect(): forms the groups of a token. Every member sends kJoin to every other member on
// every lane, and waits for the kJoin of all.
#include <netdb.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "exchange/link/link.h"

namespace diloco {

using link::FrameKind;
using link::Nonce;
using std::chrono::milliseconds;

namespace {

// How long connect() waits for its own dial when the peer's connection is there already.
constexpr milliseconds kOwnDialPatience{1000};
constexpr milliseconds kShortestShare{200};
constexpr milliseconds kAskPeriod{250};
constexpr milliseconds kLookUpPeriod{1000};
constexpr milliseconds kShortestPatience{1000};

int digit_of(char letter) {
    if (letter >= '0' && letter <= '9') return letter - '0';
    if (letter >= 'a' && letter <= 'f') return letter - 'a' + 10;
    return -1;
}

// The bytes that a text of hexadecimal digits stands for: a nonce, or a key.
template <class Bytes>
Bytes bytes_of(const char* what, const std::string& text) {
    Bytes bytes{};
    bool is_sound = text.size() == 2 * bytes.size();
    for (size_t i = 0; is_sound && i < bytes.size(); ++i) {
        const int high = digit_of(text[2 * i]), low = digit_of(text[2 * i + 1]);
        is_sound = high >= 0 && low >= 0;
        bytes[i] = static_cast<uint8_t>(high << 4 | (low & 15));
    }
    if (!is_sound) {
        throw std::invalid_argument(std::string(what) + " has " + std::to_string(2 * bytes.size()) +
                                    " hexadecimal digits, got \"" + text + "\"");
    }
    return bytes;
}

}  // namespace

uint64_t link::hash_of(const std::string& name) {
    uint64_t hash = 0xcbf29ce484222325;
    for (const char letter : name) {
        hash = (hash ^ static_cast<uint8_t>(letter)) * 0x100000001b3;
    }
    hash = (hash ^ (hash >> 31)) * 0x9e3779b97f4a7c15;
    return hash ^ (hash >> 29);
}

Nonce link::nonce_of(const std::string& text) { return bytes_of<Nonce>("a nonce", text); }

link::PeerId Link::peer_id_of(const std::string& name, const link::Place& place,
                              bool is_own) const {
    return {link::nonce_of(place.nonce), key_of(name, is_own, place.key)};
}

std::vector<Link::ChannelPtr> Link::connect(const std::string& token, int rank,
                                            const std::vector<link::Place>& peers, int lanes,
                                            milliseconds limit,
                                            const std::function<void()>& check) {
    check_process();
    const std::lock_guard<std::mutex> once(call_mutex_);
    Call call = begin_call(token, rank, peers, lanes, limit);
    Lock lock(mutex_);
    has_proxy_answered_ = false;
    enter(lock, call);
    try {
        auto next_check = call.begin + limits_.check;
        auto next_ask = call.begin + kAskPeriod;
        while (true) {
            const auto now = Clock::now();
            const bool is_asking = now >= next_ask;
            // are_connected() releases the lock while it writes. num_seen shows the wait below
            // whether announce() was called in that time.
            const uint64_t num_seen = num_changes_;
            if (is_asking) next_ask = now + kAskPeriod;
            if (are_connected(lock, call, is_asking)) break;
            if (is_closing_) throw std::runtime_error("the link was closed");
            if (now >= call.deadline) throw std::runtime_error(missing(call));
            if (now >= next_check) {
                lock.unlock();
                check();
                look_up_missing(call);
                lock.lock();
                next_check = now + limits_.check;
                continue;
            }
            const auto left = std::chrono::ceil<milliseconds>(call.deadline - now);
            changed_.wait_for(lock, std::min(left, limits_.check),
                              [&] { return num_changes_ != num_seen; });
        }
    } catch (...) {
        if (!lock.owns_lock()) lock.lock();
        give_up(lock, call);
        throw;
    }
    for (const ChannelPtr& channel : call.channels) {
        if (!channel) continue;
        for (link::Lane& lane : channel->peer.lanes) stop_dial(lock, lane);
        channel->state = Channel::State::kOpen;
        channel->num_open = 2 * lanes;
    }
    return call.channels;
}

// Checks the arguments and looks the addresses up, which may take a while.
Link::Call Link::begin_call(const std::string& token, int rank,
                            const std::vector<link::Place>& peers, int lanes, milliseconds limit) {
    Call call;
    call.token = link::hash_of(token);
    call.lanes = lanes;
    call.begin = Clock::now();
    call.deadline = call.begin + limit;
    const auto size = peers.size();
    if (rank < 0 || static_cast<size_t>(rank) >= size ||
        peers[static_cast<size_t>(rank)].nonce != nonce_text_) {
        throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                                    " peers is not this process");
    }
    if (lanes < 1 || lanes > link::kMostLanes) {
        throw std::invalid_argument("a link has 1 to " + std::to_string(link::kMostLanes) +
                                    " lanes, got " + std::to_string(lanes));
    }
    // With a proxy, only the proxy's own name is looked up here: the proxy looks up the peers'.
    const auto of_proxy =
        proxy_ ? look_up(proxy_->host, proxy_->port, AI_NUMERICSERV) : std::vector<Address>();
    std::string apart;
    for (size_t i = 0; i < size; ++i) {
        const auto& [nonce, address, key, relay] = peers[i];
        for (size_t j = 0; j < i; ++j) {
            if (peers[j].nonce != nonce) continue;
            throw std::invalid_argument("rank " + std::to_string(j) + " and rank " +
                                        std::to_string(i) + " are the same process");
        }
        const std::string name = "rank " + std::to_string(i);
        call.ids.push_back(peer_id_of(name, peers[i], i == static_cast<size_t>(rank)));
        call.addresses.push_back(address);
        call.targets.emplace_back();
        call.found.emplace_back();
        call.are_relayed.push_back(address.empty() && address_.empty() && !relay.empty() &&
                                   !peers[static_cast<size_t>(rank)].relay.empty());
        if (i == static_cast<size_t>(rank)) continue;
        const std::string& dialled = call.are_relayed.back() ? relay : address;
        if (dialled.empty()) {
            if (!address_.empty()) continue;
            apart += (apart.empty() ? "" : ", ") + ("rank " + std::to_string(i));
            continue;
        }
        const auto place = split_place(dialled);
        if (!place) {
            throw std::invalid_argument("the address of rank " + std::to_string(i) +
                                        " must be \"host:port\", got \"" + dialled + "\"");
        }
        call.targets.back() = *place;
        call.found.back() = proxy_ ? of_proxy : addresses_of(*place);
    }
    if (!apart.empty()) {
        throw std::runtime_error("this process (rank " + std::to_string(rank) + ") and " + apart +
                                 " have no address that others can dial: one of each two needs "
                                 "an address, or both need a relay");
    }
    for (size_t i = 0; i < size; ++i) {
        call.peers.emplace_back();
        call.channels.emplace_back();
        if (i == static_cast<size_t>(rank)) continue;
        std::string at = call.addresses[i].empty() ? "" : " at " + call.addresses[i];
        if (call.are_relayed[i]) at = " through the relay at " + peers[i].relay;
        call.peers.back() = std::make_shared<link::Peer>();
        call.peers.back()->id = call.ids[i];
        call.peers.back()->name = "rank " + std::to_string(i) + at;
    }
    return call;
}

std::vector<Address> Link::addresses_of(const std::pair<std::string, std::string>& target) const {
    // With a proxy, this process dials the proxy, which looks up the target's name.
    const auto& [host, port] = target;
    return proxy_ ? look_up(proxy_->host, proxy_->port, AI_NUMERICSERV)
                  : look_up(host, port, AI_NUMERICSERV);
}

// Looks up again the hosts that had no address: the name of a host that has just started may not be
// known yet.
void Link::look_up_missing(Call& call) const {
    const auto now = Clock::now();
    if (now < call.next_look_up) return;
    for (size_t i = 0; i < call.found.size(); ++i) {
        if (!call.found[i].empty() || call.targets[i].first.empty()) continue;
        call.found[i] = addresses_of(call.targets[i]);
    }
    call.next_look_up = Clock::now() + kLookUpPeriod;
}

// The public key of a process from its hexadecimal text; zeros if this link has no key. Errors call
// the process `name`.
link::PublicKey Link::key_of(const std::string& name, bool is_own, const std::string& text) const {
    if (!identity_) {
        if (text.empty()) return {};
        throw std::invalid_argument("this link has no key, and " + name + " has the key " + text);
    }
    if (text.empty() && is_own) return public_key();
    if (text.empty()) {
        throw std::invalid_argument("this link has a key, and the key of " + name + " is missing");
    }
    const auto key = bytes_of<link::PublicKey>("a public key", text);
    if (is_own && key != public_key()) {
        throw std::invalid_argument("this process (" + name + ") has the key " +
                                    link::to_hex(public_key()) + ", and not " + text);
    }
    return key;
}

// Closes connections of processes that have claimed the nonce of a member, with another key, before
// this process knew the members' keys.
void Link::end_other_keys(Lock& lock, const Call& call) {
    for (const auto& [id, peer] : std::map(peers_)) {
        for (const PeerPtr& wanted : call.peers) {
            if (!wanted || wanted->id.first != id.first || wanted->id == id) continue;
            for (const link::Lane& lane : std::vector(peer->lanes)) {
                for (const ConnectionPtr& one : {lane.own, lane.theirs}) {
                    if (one) disconnect(lock, one, "its key is not the key of " + wanted->name);
                }
            }
        }
    }
}

// Registers the call's peers and channels with the link, so that frames reach them.
void Link::enter(Lock& lock, Call& call) {
    const auto& closed = closed_tokens_;
    bool was_used = std::find(closed.begin(), closed.end(), call.token) != closed.end();
    for (const PeerPtr& wanted : call.peers) {
        if (wanted && is_other_key(wanted->id)) {
            throw std::invalid_argument(wanted->name + " has another key in another group");
        }
        const auto known = wanted ? peers_.find(wanted->id) : peers_.end();
        if (known == peers_.end()) continue;
        const auto channel = known->second->channels.find(call.token);
        was_used = was_used || (channel != known->second->channels.end() &&
                                channel->second->state != Channel::State::kUnknown);
    }
    if (was_used) throw std::invalid_argument("groups of this token have been made before");
    if (is_closing_) throw std::runtime_error("the link was closed");
    end_other_keys(lock, call);
    for (size_t i = 0; i < call.peers.size(); ++i) {
        if (!call.peers[i]) continue;
        const std::string name = call.peers[i]->name;
        call.peers[i] = peer_of(call.peers[i]->id, name);
        link::Peer& peer = *call.peers[i];
        peer.name = name;
        ++peer.num_users;
        const auto num_lanes = static_cast<size_t>(call.lanes);
        if (peer.lanes.size() < num_lanes) peer.lanes.resize(num_lanes);
        ChannelPtr& channel = peer.channels[call.token];
        if (!channel) channel = std::make_shared<Channel>(peer, call.token);
        // `since` may be reset: the peer sends no messages before it has this process's kJoin.
        channel->since = Clock::now();
        channel->state = Channel::State::kForming;
        channel->own_lanes = call.lanes;
        call.channels[i] = channel;
    }
}

bool Link::are_connected(Lock& lock, Call& call, bool is_asking) {
    bool are_all = true;
    for (size_t rank = 0; rank < call.channels.size(); ++rank) {
        if (!call.channels[rank]) continue;
        for (int lane = 0; lane < call.lanes; ++lane) {
            are_all = connect_lane(lock, call, rank, lane, is_asking) && are_all;
        }
        flush_peer(lock, *call.peers[rank]);
        const Channel& channel = *call.channels[rank];
        if (!channel.dead.empty()) throw std::runtime_error(channel.dead);
        if (!channel.ended.empty()) throw std::runtime_error(missing(call));
        if (channel.num_lanes != 0 && channel.num_lanes != static_cast<uint64_t>(call.lanes)) {
            throw std::runtime_error("this process has " + std::to_string(call.lanes) +
                                     " lanes, and " + call.peers[rank]->name + " has " +
                                     std::to_string(channel.num_lanes));
        }
    }
    return are_all;
}

// Returns whether a lane is connected and the peer has joined. If not, takes the next step: chooses
// a connection, starts a dial, or sends kJoin.
bool Link::connect_lane(Lock& lock, Call& call, size_t rank, int lane, bool is_asking) {
    link::Lane& it = call.peers[rank]->lanes[static_cast<size_t>(lane)];
    Channel& channel = *call.channels[rank];
    const auto& found = call.found[rank];
    if (!it.chosen) {
        const auto now = Clock::now();
        it.chosen = it.own;
        if (!it.own && it.theirs) {
            const auto since = std::max(it.theirs_since, call.begin);
            const bool has_failed = it.dial && !it.dial->trouble.empty();
            if (found.empty() || has_failed || now - since > kOwnDialPatience) {
                it.chosen = it.theirs;
                stop_dial(lock, it);
            }
        }
        if (it.dial && it.dial->is_redial && !found.empty()) stop_dial(lock, it);
        if (!it.chosen && !it.dial && !found.empty()) {
            it.dial = std::make_shared<link::Dial>();
            it.dial->peer = call.peers[rank];
            it.dial->lane = lane;
            it.dial->addresses = found;
            it.dial->target = call.targets[rank];
            it.dial->is_relayed = call.are_relayed[rank];
            it.dial->share = std::max<Clock::duration>(
                (call.deadline - call.begin) / static_cast<int>(found.size()), kShortestShare);
            dials_.push_back(it.dial);
            wake();
        }
        if (!it.chosen) return false;
        it.chosen->has_carried = true;
    }
    if (channel.told.insert(it.chosen->id).second) {
        channel.put_join(lane, call.lanes, false);
    } else if (is_asking && channel.joined.count(lane) == 0) {
        channel.put_join(lane, call.lanes, true);
    }
    const bool is_alive = has_answered(lock, call, ConnectionPtr(it.chosen));
    return is_alive && channel.joined.count(lane) > 0;
}

// Whether a byte has come over a connection since the call began. A connection over which no byte
// has come is closed after a while, and the lane is dialled anew: a router may have forgotten the
// connection.
bool Link::has_answered(Lock& lock, const Call& call, const ConnectionPtr& connection) {
    if (connection->heard_at >= call.begin) return true;
    ping(connection);
    const auto patience =
        std::max<Clock::duration>((call.deadline - call.begin) / 4, kShortestPatience);
    if (Clock::now() - call.begin > patience) {
        disconnect(lock, connection, "nothing comes over its former connection");
    }
    return false;
}

std::string Link::missing(const Call& call) const {
    std::string text;
    for (size_t rank = 0; rank < call.channels.size(); ++rank) {
        const std::string one = missing_rank(call, rank);
        if (one.empty()) continue;
        text += (text.empty() ? "" : "; ") + one;
    }
    // The refused connection may be one of any missing rank.
    if (refused_at_ >= call.begin) text += "; a connection from " + last_refusal_;
    return text;
}

// Why a rank is not connected; empty if it is.
std::string Link::missing_rank(const Call& call, size_t rank) const {
    if (!call.channels[rank]) return "";
    const Channel& channel = *call.channels[rank];
    const std::string& name = call.peers[rank]->name;
    if (!channel.ended.empty()) return name + " has given up";
    for (int i = 0; i < call.lanes; ++i) {
        const link::Lane& lane = call.peers[rank]->lanes[static_cast<size_t>(i)];
        if (lane.chosen && channel.joined.count(i) > 0) continue;
        if (lane.chosen) {
            return name +
                   " is connected, and has not come to this group: it may be stopped, or "
                   "still be on its way";
        }
        if (call.addresses[rank].empty() && !call.are_relayed[rank]) {
            return name + " has no address that others can dial, and has not dialled this process";
        }
        if (call.found[rank].empty() && proxy_ && !call.targets[rank].first.empty()) {
            return name + " cannot be reached: " + proxy_->unreachable("its host has no address");
        }
        if (call.found[rank].empty()) return name + " has an address that is not known here";
        const std::string why = lane.dial ? trouble_of(*lane.dial) : unreachable("no answer");
        return name + " cannot be reached: " + why;
    }
    return "";
}

std::vector<link::LaneFacts> Link::lanes(const std::string& nonce) const {
    check_process();
    const Nonce wanted = link::nonce_of(nonce);
    const Lock lock(mutex_);
    std::vector<link::LaneFacts> facts;
    for (const auto& [id, peer] : peers_) {
        if (id.first != wanted) continue;
        for (const link::Lane& lane : peer->lanes) {
            const bool is_own = lane.own != nullptr;
            facts.push_back({is_own, is_own ? "" : lane.trouble,
                             lane.chosen ? tcp_facts_of(lane.chosen->fd.get()) : TcpFacts()});
        }
    }
    return facts;
}

// Ends a call of connect() that has failed, and tells the other members at once.
void Link::give_up(Lock& lock, Call& call) {
    for (size_t rank = 0; rank < call.channels.size(); ++rank) {
        if (!call.channels[rank]) continue;
        link::Peer& peer = *call.peers[rank];
        for (link::Lane& lane : peer.lanes) stop_dial(lock, lane);
        for (int number = 0; number < 2 * call.lanes; ++number) {
            call.channels[rank]->put(FrameKind::kEnd, number, 0, 0, 0, 0);
        }
        flush_peer(lock, peer);
        forget_channel(peer, call.token);
    }
}

}  // namespace diloco
