#include <fcntl.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <optional>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "codec/codec.h"
#include "exchange/bindings/bindings.h"
#include "exchange/bindings/shared.h"
#include "exchange/engine/engine.h"
#include "exchange/joining/state_source.h"
#include "exchange/link/group.h"
#include "exchange/link/proxy.h"
#include "exchange/link/sockets.h"
#include "exchange/link/strangers.h"
#include "exchange/store/store_client.h"
#include "exchange/store/store_host.h"
#include "exchange/transport/pages.h"

namespace py = pybind11;

namespace diloco {

using std::chrono::milliseconds;

milliseconds from_seconds(double seconds) {
    constexpr double kMostSeconds = 10 * 365 * 86400.0;
    TORCH_CHECK_VALUE(!std::isnan(seconds), "a time must be a number of seconds, got nan");
    const std::chrono::duration<double> clamped(std::clamp(seconds, 0.0, kMostSeconds));
    return std::chrono::ceil<milliseconds>(clamped);
}

void check_signals() {
    std::optional<py::gil_scoped_acquire> gil;
    try {
        gil.emplace();
    } catch (...) {  // the interpreter ends, see WithoutGil
        while (true) pause();
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

namespace {

// Each peer is its nonce and its address, then if known its public key and its relay's address.
using Places = std::vector<std::vector<std::string>>;

std::vector<link::Place> places_of(const Places& peers) {
    std::vector<link::Place> places;
    for (const std::vector<std::string>& peer : peers) {
        if (peer.size() < 2 || peer.size() > 4) {
            throw std::invalid_argument("a peer is (nonce, address[, key[, relay]])");
        }
        places.push_back(
            {peer[0], peer[1], peer.size() > 2 ? peer[2] : "", peer.size() > 3 ? peer[3] : ""});
    }
    return places;
}

std::vector<c10::intrusive_ptr<LinkGroup>> make_groups(Link& link, const std::string& token,
                                                       int rank, const Places& peers, int lanes,
                                                       double limit_s,
                                                       const std::optional<py::function>& is_void) {
    const auto places = places_of(peers);
    const auto check = [&is_void] {
        check_signals();
        const py::gil_scoped_acquire gil;
        if (is_void && (*is_void)().cast<bool>()) {
            throw std::runtime_error("another attempt has begun");
        }
    };
    const WithoutGil no_gil;
    return connect_groups(link, token, rank, places, lanes, from_seconds(limit_s), check);
}

// The bytes of a seed or of a public key.
std::array<uint8_t, 32> key_of(const char* what, const std::string& bytes) {
    std::array<uint8_t, 32> key;
    if (bytes.size() != key.size()) {
        throw std::invalid_argument(std::string(what) + " has 32 bytes, got " +
                                    std::to_string(bytes.size()));
    }
    std::copy(bytes.begin(), bytes.end(), key.begin());
    return key;
}

py::bytes bytes_of(const link::PublicKey& key) {
    return {reinterpret_cast<const char*>(key.data()), key.size()};
}

// The identity of the private key `seed`; null if the text is empty.
std::shared_ptr<link::Identity> open_identity(const std::string& seed) {
    if (seed.empty()) return nullptr;
    // The import makes Python load its OpenSSL, which the link uses too.
    py::module_::import("ssl");
    const WithoutGil no_gil;
    return link::Identity::open(key_of("a seed", seed));
}

template <typename Body>
auto without_gil(Body body) {
    const WithoutGil no_gil;
    return body();
}

// Scheme, host, port, user and password.
using ProxyParts =
    std::tuple<std::string, std::string, int, std::optional<std::string>, std::string>;

std::optional<link::Proxy> proxy_of(const std::optional<ProxyParts>& parts) {
    if (!parts) return std::nullopt;
    const auto& [scheme, host, port, user, password] = *parts;
    return link::Proxy{scheme == "socks5", host, std::to_string(port), user, password};
}

// Connects through a proxy, and returns a descriptor that the caller must close.
int dial_through(const ProxyParts& proxy, const std::string& host, int port, double limit_s) {
    const auto end = std::chrono::steady_clock::now() + from_seconds(limit_s);
    link::Dialled dialled;
    {
        const WithoutGil no_gil;
        dialled = link::dial_through(*proxy_of(proxy), host, std::to_string(port), end);
    }
    const int fd = dialled.fd ? fcntl(dialled.fd.get(), F_DUPFD_CLOEXEC, 0) : -1;
    if (fd >= 0) return fd;
    const std::string why = dialled.fd ? std::strerror(errno) : dialled.trouble;
    PyErr_SetString(PyExc_ConnectionError, why.c_str());
    throw py::error_already_set();
}

std::shared_ptr<Link> open_link(const std::string& listen, const std::string& advertise,
                                const std::string& seed, const std::optional<ProxyParts>& proxy) {
    std::optional<link::Seed> own;
    if (!seed.empty()) {
        own = key_of("a seed", seed);
        py::module_::import("ssl");
    }
    // Release the GIL, because looking up a host's name may take long.
    const WithoutGil no_gil;
    return Link::open(listen, advertise, Link::Limits(), own, proxy_of(proxy));
}

std::set<link::PublicKey> keys_of(const std::vector<py::bytes>& keys) {
    std::set<link::PublicKey> found;
    for (const py::bytes& key : keys) found.insert(key_of("a public key", key));
    return found;
}

// Sets the allowed keys of a link, or of the host of a store.
template <typename Keyed>
void allow(Keyed& keyed, const std::vector<py::bytes>& keys) {
    std::set<link::PublicKey> allowed = keys_of(keys);
    const WithoutGil no_gil;
    keyed.allow(std::move(allowed));
}

py::bytes public_key(const Link& link) {
    if (!link.has_key()) return {};
    return bytes_of(link.public_key());
}

uint32_t send_request(Link& link, const std::vector<std::string>& peer, const std::string& service,
                      const std::string& request, uint64_t most_bytes) {
    const link::Place place = places_of({peer}).front();
    const std::vector<uint8_t> bytes(request.begin(), request.end());
    const WithoutGil no_gil;
    return link.request(place, service, bytes, most_bytes);
}

py::list replies(Link& link, const std::string& service, double limit_s) {
    py::list found;
    for (link::Reply& reply :
         without_gil([&] { return link.replies(service, from_seconds(limit_s)); })) {
        const auto& [owner, data, num_bytes] = reply.body;
        // A uint8 tensor that keeps the body's bytes alive.
        const at::Tensor body = at::from_blob(
            const_cast<uint8_t*>(data), {static_cast<int64_t>(num_bytes)},
            [owner = owner](void*) {}, at::kByte);
        const auto* head = reinterpret_cast<const char*>(reply.head.data());
        found.append(py::make_tuple(reply.ticket, py::bytes(head, reply.head.size()), body));
    }
    return found;
}

void register_state_source(py::module_& m) {
    using release = py::call_guard<WithoutGil>;
    using Numbers = std::tuple<uint64_t, uint64_t, uint64_t>;
    const auto standing_of = [](const Numbers& numbers) {
        const auto& [round, history, num_steps] = numbers;
        return StateSource::Standing{round, history, num_steps};
    };
    py::class_<StateSource, std::shared_ptr<StateSource>>(
        m, "StateSource", "Answers replicas that join: the outer state and the latest rounds.")
        .def(py::init<std::vector<std::vector<at::Tensor>>>(), py::arg("parts"))
        .def_property_readonly_static("MOST_BYTES",
                                      [](const py::object&) { return StateSource::kMostBytes; })
        .def("begin_write", &StateSource::begin_write, py::arg("fragment"))
        .def(
            "end_write",
            [standing_of](StateSource& source, size_t fragment, const Numbers& standing) {
                source.end_write(fragment, standing_of(standing));
            },
            py::arg("fragment"), py::arg("standing"), release())
        .def("add", &StateSource::add, py::arg("fragment"), py::arg("number"), py::arg("entry"),
             py::arg("payloads"), release())
        .def("remove", &StateSource::remove, py::arg("fragment"), py::arg("number"), release())
        .def(
            "open",
            [standing_of](StateSource& source, const std::vector<Numbers>& numbers) {
                std::vector<StateSource::Standing> standings;
                for (const Numbers& one : numbers) standings.push_back(standing_of(one));
                source.open(standings);
            },
            py::arg("standings"), release())
        .def_property_readonly("served_bytes", &StateSource::served_bytes)
        .def("close", &StateSource::close, release());
}

void register_link(py::module_& m) {
    using release = py::call_guard<WithoutGil>;
    m.def("own_host", &own_host, py::arg("interface"), release(),
          "The host at which gloo would listen on this interface; 127.0.0.1 where it could not.");
    m.def(
        "link_public_key",
        [](const py::bytes& seed) { return bytes_of(open_identity(seed)->public_key()); },
        py::arg("seed"), "The public key of a private one.");
    m.def("dial_through", &dial_through, py::arg("proxy"), py::arg("host"), py::arg("port"),
          py::arg("limit_s"),
          "A connection that a proxy has made, as a descriptor of the caller's; ConnectionError.");
    m.def("raise_descriptors", &link::raise_descriptors,
          "Raises the limit of open files as far as allowed, and returns the limit.");
    m.def("most_strangers", &link::most_strangers,
          "How many strangers this process keeps; raises the limit of open files.");
    py::class_<link::Reserve>(m, "Reserve", "Descriptors for the time when no other one is left.")
        .def(py::init<>())
        .def("fill", &link::Reserve::fill)
        .def("release", &link::Reserve::release, "Frees one descriptor; False where none is left.");
    py::class_<link::Strangers>(m, "Strangers", "Connections that have not shown who they are.")
        .def(py::init<>())
        .def("__len__", &link::Strangers::size)
        .def("add", &link::Strangers::add, py::arg("id"), py::arg("origin"))
        .def("hear", &link::Strangers::hear, py::arg("id"),
             "A byte has come; whether this stranger counted as silent before.")
        .def("remove", &link::Strangers::remove, py::arg("id"))
        .def("choose", &link::Strangers::choose,
             "The stranger that goes when there are too many; 0 where there is none.");
    py::class_<LinkGroup, c10d::Backend, c10::intrusive_ptr<LinkGroup>>(m, "LinkGroup");
    py::class_<link::PeerLife>(m, "PeerLife", "The life of a process, as a link knows it.")
        .def_readonly("nonce", &link::PeerLife::nonce)
        .def_readonly("silent_s", &link::PeerLife::silent_s,
                      "Seconds since its last byte; infinite before the first.")
        .def_readonly("still_s", &link::PeerLife::still_s,
                      "Seconds since its inner step moved, or bytes of a round with it.")
        .def_readonly("inner_step", &link::PeerLife::inner_step)
        .def_readonly("phase", &link::PeerLife::phase)
        .def_readonly("is_connected", &link::PeerLife::is_connected)
        .def_readonly("is_refused", &link::PeerLife::is_refused,
                      "It is silent, and its address refuses: it has ended.");
    py::class_<Link, std::shared_ptr<Link>>(m, "Link")
        .def(py::init([](const std::string& listen, const std::string& advertise,
                         const py::bytes& seed, const std::optional<ProxyParts>& proxy) {
                 return open_link(listen, advertise, seed, proxy);
             }),
             py::arg("listen"), py::arg("advertise"), py::arg("seed") = py::bytes(),
             py::arg("proxy") = std::nullopt)
        .def_property_readonly("address", &Link::address,
                               "Where the others can dial this process; empty: nowhere.")
        .def_property_readonly("nonce", &Link::nonce)
        .def_property_readonly("public_key", &public_key, "Empty without a seed.")
        .def("allow", &allow<Link>, py::arg("keys"),
             "Replaces the public keys that may connect; connections of other keys end.")
        .def("groups", &make_groups, py::arg("token"), py::arg("rank"), py::arg("peers"),
             py::arg("lanes"), py::arg("limit_s"), py::arg("is_void") = py::none(),
             "Two groups for each lane, once all peers have called it: (nonce, address, public key "
             "as hexadecimal digits, address of a relay) of each rank. Gives up when is_void says "
             "so.")
        .def(
            "adopt", [](Link& link, int fd) { link.adopt(Descriptor([fd] { return fd; })); },
            py::arg("fd"), release(), "Takes a connection that a peer has dialled at a relay.")
        .def(
            "serve",
            [](Link& link, const std::string& service, std::shared_ptr<StateSource> source) {
                link.set_responder(service, source ? source->responder() : nullptr);
            },
            py::arg("service"), py::arg("source"), release(),
            "Sets the source that answers requests to this name from now on; None: nothing does.")
        .def(
            "reach",
            [](Link& link, const std::string& service, const Places& peers) {
                const auto places = places_of(peers);
                return without_gil([&] { return link.reach(service, places); });
            },
            py::arg("service"), py::arg("peers"),
            "Connects to processes outside of groups, and keeps dialling until the next call: why "
            "each is not connected so far, or an empty text.")
        .def("request", &send_request, py::arg("peer"), py::arg("service"), py::arg("request"),
             py::arg("most_bytes"), "The number of the request; 0 without a connection.")
        .def("replies", &replies, py::arg("service"), py::arg("limit_s"),
             "(number, head, body) of the answers that have come; an empty head: no whole answer "
             "came.")
        .def("arrived", &Link::arrived, py::arg("tickets"), release(),
             "Bytes that have come so far of the bodies of open requests.")
        .def("forget", &Link::forget, py::arg("tickets"), release())
        .def(
            "set_progress",
            [](Link& link, uint64_t inner_step, const std::string& phase) {
                link.set_progress(inner_step, link::phase_of(phase));
            },
            py::arg("inner_step"), py::arg("phase"),
            "Sets the words of the next beats about this process.")
        .def("life", &Link::life, release(),
             "The life of each process that a group has, or that reach() has asked for.")
        .def(
            "tell",
            [](Link& link, const std::string& nonce, const std::string& service,
               const std::string& message) {
                const std::vector<uint8_t> bytes(message.begin(), message.end());
                return without_gil([&] { return link.tell(nonce, service, bytes); });
            },
            py::arg("nonce"), py::arg("service"), py::arg("message"),
            "Sends at most 64 KiB ahead of all bulk; False without a connection, or where a MiB "
            "waits for that process.")
        .def(
            "told",
            [](Link& link, const std::string& service, double limit_s) {
                py::list found;
                for (const auto& [nonce, bytes] :
                     without_gil([&] { return link.told(service, from_seconds(limit_s)); })) {
                    const auto* data = reinterpret_cast<const char*>(bytes.data());
                    found.append(py::make_tuple(nonce, py::bytes(data, bytes.size())));
                }
                return found;
            },
            py::arg("service"), py::arg("limit_s"),
            "(nonce, message) of what has come to this name since its first call.")
        .def("close", &Link::close, release())
        .def("counters", &Link::counters, release())
        .def(
            "lanes",
            [](const Link& link, const std::string& nonce) {
                py::list lanes;
                for (const auto& [is_own, trouble, tcp] :
                     without_gil([&] { return link.lanes(nonce); })) {
                    lanes.append(py::make_tuple(is_own, trouble, tcp.congestion, tcp.num_segments,
                                                tcp.num_sent_again));
                }
                return lanes;
            },
            py::arg("nonce"),
            "For each lane to a process: whether this process has dialled the connection; why its "
            "dial has failed; the connection's congestion control; and its segments with data, "
            "sent and sent again.");
}

void register_store_client(py::module_& m) {
    using release = py::call_guard<WithoutGil>;
    const auto record_of = [](StoreClient::Record record) {
        return py::make_tuple(py::bytes(record.first), record.second);
    };
    py::class_<StoreClient, c10d::Store, c10::intrusive_ptr<StoreClient>>(m, "StoreClient")
        .def(py::init([](const std::string& host, int port, const py::bytes& seed,
                         const std::vector<py::bytes>& allowed, double timeout_s,
                         const std::optional<ProxyParts>& proxy, const std::string& table_id,
                         bool connects) {
                 StoreClient::Place place{host, static_cast<uint16_t>(port), open_identity(seed),
                                          keys_of(allowed), proxy_of(proxy)};
                 const WithoutGil no_gil;
                 return c10::make_intrusive<StoreClient>(std::move(place), from_seconds(timeout_s),
                                                         table_id, connects);
             }),
             py::arg("host"), py::arg("port"), py::arg("seed"), py::arg("allowed"),
             py::arg("timeout_s"), py::arg("proxy") = std::nullopt, py::kw_only(),
             py::arg("table_id") = "", py::arg("connects") = true,
             "Without a seed, the connection is plain.")
        .def_property_readonly("host", &StoreClient::host)
        .def_property_readonly("port", &StoreClient::port)
        .def("another", &StoreClient::another, py::arg("table_id") = "",
             "A further connection, made by the first call, to the table of that id.")
        .def_property_readonly("table_id", &StoreClient::table_id,
                               "The table that must answer; empty before the first answer.")
        .def_property_readonly(
            "found_id", [](const StoreClient& store) { return store.facts().table_id; },
            "The table that answered last.")
        .def_property_readonly(
            "process_nonce", [](const StoreClient& store) { return store.facts().process; },
            "The random name of the host's process.")
        .def_property_readonly(
            "is_durable", [](const StoreClient& store) { return store.facts().is_durable; },
            "Whether the host has a journal.")
        .def_property_readonly(
            "is_refused", [](const StoreClient& store) { return store.facts().is_refused; },
            "Whether the last dial has failed because of a key.")
        .def(
            "read_record",
            [record_of](StoreClient& store, const std::string& run, double limit_s) {
                return record_of(
                    without_gil([&] { return store.read_record(run, from_seconds(limit_s)); }));
            },
            py::arg("run"), py::arg("limit_s"), "The record of a run, and its revision.")
        .def(
            "swap_record",
            [](StoreClient& store, const std::string& run, const std::string& old,
               const std::string& next,
               double limit_s) { return store.swap_record(run, old, next, from_seconds(limit_s)); },
            py::arg("run"), py::arg("old"), py::arg("new"), py::arg("limit_s"), release())
        .def(
            "look",
            [](StoreClient& store, const std::string& run, const std::string& member,
               const std::string& text, uint64_t version, uint64_t revision, double limit_s) {
                const auto seen = without_gil([&] {
                    return store.look(run, member, text, version, revision, from_seconds(limit_s));
                });
                py::list beats;
                for (const auto& [name, last, age_s] : seen.beats) {
                    beats.append(py::make_tuple(name, py::bytes(last), age_s));
                }
                return py::make_tuple(seen.version, seen.revision, py::bytes(seen.record),
                                      py::bytes(seen.counts), seen.is_whole, beats);
            },
            py::arg("run"), py::arg("member"), py::arg("text"), py::arg("version"),
            py::arg("revision"), py::arg("limit_s"),
            "Keeps a member's beat, and returns what has changed since a look: its version, the "
            "revision and the record (empty where the revision is known), the last byte of the "
            "number of each member's beats, whether all beats follow, and (member, text, age in "
            "seconds) of beats.")
        .def("post", &StoreClient::post, py::arg("run"), py::arg("member"), py::arg("text"),
             release(),
             "Sends a text for the host alone, without waiting for an answer; False where the host "
             "takes none, or nothing is connected. An empty text takes the last one back.")
        .def(
            "watch_record",
            [record_of](StoreClient& store, const std::string& run, uint64_t revision,
                        double seconds) {
                return record_of(without_gil(
                    [&] { return store.watch_record(run, revision, from_seconds(seconds)); }));
            },
            py::arg("run"), py::arg("revision"), py::arg("seconds"),
            "The record once its revision is another one, or the seconds have passed.");
}

void register_store_host(py::module_& m) {
    using release = py::call_guard<WithoutGil>;
    using Lasts = std::vector<store::Beats::Last>;
    const auto lasts = [](Lasts (StoreHost::*read)() const) {
        return [read](const StoreHost& host) {
            py::list found;
            for (const auto& [run, member, text, age] :
                 without_gil([&] { return (host.*read)(); })) {
                found.append(py::make_tuple(run, member, py::bytes(text),
                                            std::chrono::duration<double>(age).count()));
            }
            return found;
        };
    };
    py::class_<StoreHost, c10d::Store, c10::intrusive_ptr<StoreHost>>(m, "StoreHost")
        .def(py::init([](int listener, const py::bytes& seed, const std::vector<py::bytes>& allowed,
                         double timeout_s, const std::string& table_id,
                         const std::optional<std::map<std::string, py::bytes>>& records,
                         double drop_after_s) {
                 StoreHost::Options options;
                 options.listener = Descriptor([&] { return fcntl(listener, F_DUPFD_CLOEXEC, 0); });
                 options.identity = open_identity(seed);
                 options.allowed = keys_of(allowed);
                 options.timeout = from_seconds(timeout_s);
                 options.table_id = table_id;
                 options.is_journalled = records.has_value();
                 if (records) options.records = {records->begin(), records->end()};
                 options.drop_after = from_seconds(drop_after_s);
                 return c10::make_intrusive<StoreHost>(std::move(options));
             }),
             py::arg("listener"), py::arg("seed"), py::arg("allowed"), py::arg("timeout_s"),
             py::kw_only(), py::arg("table_id") = "", py::arg("records") = std::nullopt,
             py::arg("drop_after_s") = 600.0,
             "Serves at a listening socket, whose descriptor stays the caller's: the host has a "
             "copy. Without a seed, connections are plain. With records, swaps wait for settle().")
        .def(
            "allow",
            [](StoreHost& host, const std::vector<py::bytes>& keys,
               const std::vector<py::bytes>& readers) {
                host.allow(keys_of(keys), keys_of(readers));
            },
            py::arg("keys"), py::arg("readers") = std::vector<py::bytes>(),
            "Replaces the public keys that are let in; connections of other keys end. Readers "
            "change nothing.")
        .def_property_readonly("num_clients", &StoreHost::num_clients)
        .def_property_readonly("table_id", &StoreHost::table_id)
        .def("posted", lasts(&StoreHost::posted),
             "(run, member, text, age in seconds) of the last post of each member.")
        .def("beats", lasts(&StoreHost::beats), "The same of beats.")
        .def(
            "records",
            [](const StoreHost& host) {
                py::dict found;
                for (const auto& [run, record] : without_gil([&] { return host.all_records(); })) {
                    found[py::str(run)] = py::bytes(record);
                }
                return found;
            },
            "The record of each run.")
        .def(
            "facts",
            [](const StoreHost& host) {
                const StoreHost::Facts facts = host.facts();
                return std::map<std::string, int64_t>{{"connections", facts.connections},
                                                      {"requests", facts.requests},
                                                      {"received_bytes", facts.received_bytes},
                                                      {"sent_bytes", facts.sent_bytes},
                                                      {"refused_posts", facts.refused_posts}};
            },
            "Connections that are open, and sums since the host began.")
        .def("post", &StoreHost::post, py::arg("run"), py::arg("member"), py::arg("text"),
             release(),
             "Keeps a text of a member of this process; an empty text takes the last one back.")
        .def(
            "take_changes",
            [](StoreHost& host, double seconds) {
                py::list changes;
                for (const auto& [run, record] :
                     without_gil([&] { return host.take_changes(from_seconds(seconds)); })) {
                    changes.append(py::make_tuple(run, py::bytes(record)));
                }
                return changes;
            },
            py::arg("seconds"), "(run, new record) of each swap that waits for the journal.")
        .def("settle", &StoreHost::settle, py::arg("sentence") = "", py::arg("is_doubtful") = false,
             release(), "Says that the journal holds the changes, or why not.")
        .def("close", &StoreHost::close, release());
}

}  // namespace

void register_exchange(py::module_& m) {
    m.attr("MAX_REPLICAS") = codec::kMaxTerms;
    m.def("empty_pages", &empty_pages, py::arg("num_bytes"),
          "A zeroed uint8 tensor, 64-byte aligned, huge pages advised, every page touched.");
    m.def("minor_faults", &minor_faults, "Minor page faults of the calling thread so far.");
    m.def(
        "make_schedule",
        [](int num_chunks, int num_phases, int num_lanes, int window) {
            std::vector<std::tuple<std::string, int, int>> steps;
            for (const Step& step : make_schedule(num_chunks, num_phases, num_lanes, window)) {
                steps.emplace_back(action_name(step.action), step.chunk, step.lane);
            }
            return steps;
        },
        py::arg("num_chunks"), py::arg("num_phases"), py::arg("num_lanes"), py::arg("window"),
        "The steps of an exchange in their order: (action, chunk, lane).");
    register_messages(m);
    register_jobs(m);
    register_state_source(m);
    register_link(m);
    register_store_client(m);
    register_store_host(m);
    register_engine(m);
}

}  // namespace diloco
