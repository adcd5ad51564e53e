// Bindings of TLS for the connections that Python uses, until Python passes them to a group.
#include "bind/tls_sockets.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "bind/register.h"
#include "core/error.h"
#include "transport/tls_session.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {
namespace {

TlsSession::Key key_of(const nb::bytes& bytes) {
    TlsSession::Key key;
    if (bytes.size() != key.size())
        throw Error(Fault::invalid, "expected a TLS key of " + std::to_string(key.size()) +
                                        " bytes, got " + std::to_string(bytes.size()));
    std::copy_n(reinterpret_cast<const unsigned char*>(bytes.c_str()), key.size(), key.begin());
    return key;
}

// Raises a socket's error. Input that is not valid TLS raises EBADMSG with a description.
[[noreturn]] void raise_errno(const TlsSession& session) {
    if (errno == EBADMSG) {
        PyErr_SetObject(PyExc_OSError, nb::make_tuple(errno, session.problem()).ptr());
    } else {
        PyErr_SetFromErrno(PyExc_OSError);
    }
    throw nb::python_error();
}

}  // namespace

TlsSession& TlsEnd::get() const {
    if (!session)
        throw Error(Fault::invalid,
                    "this TLS session belongs to a group now, and only the group may use it");
    return *session;
}

void register_tls_sockets(nb::module_& m) {
    m.def("load_openssl", [](const std::string& library) { OpenSsl{library}; }, "library"_a);
    nb::class_<TlsContext>(m, "TlsContext")
        .def("__init__", [](TlsContext* self) { new (self) TlsContext(nullptr); })
        .def(
            "__init__",
            [](TlsContext* self, std::string certificate, std::string key, std::string authority) {
                const TlsFiles files{std::move(certificate), std::move(key), std::move(authority)};
                new (self) TlsContext(&files);
            },
            "certificate"_a, "key"_a, "authority"_a);
    nb::class_<TlsEnd>(m, "TlsSession")
        .def(
            "__init__",
            [](TlsEnd* self, const TlsContext& context, int fd, bool dialing,
               const nb::bytes& key) {
                new (self) TlsEnd{std::make_unique<TlsSession>(context, fd, dialing, key_of(key))};
            },
            "context"_a, "fd"_a, "dialing"_a, "key"_a)
        .def("shake", [](TlsEnd& self) { return self.get().shake(); })
        .def("binding",
             [](const TlsEnd& self) {
                 const TlsSession::Key number = self.get().binding();
                 return nb::bytes(number.data(), number.size());
             })
        .def("renew_key", [](TlsEnd& self) { return self.get().renew_key(); })
        .def(
            "recv",
            [](TlsEnd& self, size_t most) {
                std::string data(most, '\0');
                const ssize_t got = self.get().read(data.data(), data.size());
                if (got < 0) raise_errno(self.get());
                return nb::bytes(data.data(), static_cast<size_t>(got));
            },
            "most"_a)
        .def(
            "send",
            [](TlsEnd& self, const nb::bytes& data) {
                const iovec part{const_cast<char*>(data.c_str()), data.size()};
                const ssize_t sent = self.get().write(&part, data.size() > 0 ? 1 : 0);
                if (sent < 0) raise_errno(self.get());
                return sent;
            },
            "data"_a);
}

}  // namespace unisono::bind
