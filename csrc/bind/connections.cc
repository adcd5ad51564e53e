// Bindings of a group on several hosts, for the connection manager.
#include "bind/connections.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/message_libraries.h"
#include "bind/nonce.h"
#include "bind/tls_sockets.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {

void bind_hosts(nb::class_<Group>& group) {
    group
        .def_static(
            "of_hosts",
            [](int fd, uint32_t rank, uint32_t ranks, std::vector<uint32_t> here,
               const nb::bytes& nonce, uint32_t cores, const nb::object& make_library) {
                return std::make_unique<Group>(Descriptor(fd), rank,
                                               HostRanks{ranks, std::move(here)}, nonce_of(nonce),
                                               cores, transports_of(make_library));
            },
            "fd"_a, "rank"_a, "ranks"_a, "here"_a, "nonce"_a, "cores"_a,
            "make_library"_a = nb::none())
        .def(
            "attach",
            [](Group& self, uint32_t peer, uint32_t kind, uint32_t stream, uint32_t streams, int fd,
               TlsEnd* tls) {
                Channel channel(Descriptor(fd), tls ? std::move(tls->session) : nullptr);
                if (kind > static_cast<uint32_t>(TransportKind::p2p))
                    throw Error(Fault::invalid, "kind: expected 0 (collectives) or 1 (p2p), got " +
                                                    std::to_string(kind));
                self.attach(peer, static_cast<TransportKind>(kind), stream, streams,
                            std::move(channel));
            },
            "peer"_a, "kind"_a, "stream"_a, "streams"_a, "fd"_a, "tls"_a.none() = nb::none())
        .def_static(
            "say_left",
            [](int fd, TlsEnd* tls) {
                TcpTransport::say_left_to(
                    Channel(Descriptor(fd), tls ? std::move(tls->session) : nullptr));
            },
            "fd"_a, "tls"_a.none() = nb::none())
        .def("abandon", &Group::abandon)
        .def("peer_left", &Group::peer_left, "peer"_a)
        .def(
            "fail",
            [](Group& self, uint32_t fault, const std::string& text) {
                constexpr auto kLast = static_cast<uint32_t>(Fault::unsupported);
                if (fault == 0 || fault > kLast)
                    throw Error(Fault::invalid, "fault: expected a number from 1 to " +
                                                    std::to_string(kLast) + ", got " +
                                                    std::to_string(fault));
                self.fail(static_cast<Fault>(fault), text);
            },
            "fault"_a, "text"_a, nb::call_guard<WithoutGil>())
        .def("failure",
             [](Group& self) -> nb::object {
                 const auto failure = self.members().failure();
                 if (!failure) return nb::none();
                 return nb::make_tuple(static_cast<uint32_t>(failure->fault()), text_of(*failure));
             })
        .def("called",
             [](Group& self) {
                 const Activity doing = self.doing();
                 return nb::bytes(reinterpret_cast<const char*>(&doing), sizeof(doing));
             })
        .def(
            "record_last_call",
            [](Group& self, uint32_t peer, const nb::bytes& packed) {
                Activity doing{};
                if (packed.size() != sizeof(doing))
                    throw Error(Fault::invalid, "called: expected " +
                                                    std::to_string(sizeof(doing)) + " bytes, got " +
                                                    std::to_string(packed.size()));
                std::memcpy(&doing, packed.c_str(), sizeof(doing));
                self.record_last_call(peer, doing);
            },
            "peer"_a, "called"_a)
        .def("events_fd", [](Group& self) { return self.members().events().fd(); })
        .def("take_events", [](Group& self) { return self.members().events().take(); });
}

}  // namespace unisono::bind
