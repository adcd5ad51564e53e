#include "errors.h"

#include <nanobind/stl/string.h>

#include <string>
#include <string_view>

#include "gil.h"

namespace nb = nanobind;

namespace unisono::bind {
namespace {

const char* class_of(Fault fault) {
    switch (fault) {
        case Fault::peer_lost:
            return "PeerLostError";
        case Fault::timeout:
            return "CollectiveTimeoutError";
        case Fault::mismatch:
            return "MismatchError";
        case Fault::aborted:
        case Fault::interrupted:
            return "AbortedError";
        case Fault::stranger:
            return "AuthenticationError";
        case Fault::unsupported:
            return "UnsupportedError";
        case Fault::none:
        case Fault::system:
        case Fault::invalid:
            break;
    }
    return "UnisonoError";
}

void set_python_error(const Error& error) {
    if (error.fault() == Fault::interrupted && PyErr_Occurred()) return;  // what the handler raised
    const nb::object type = nb::module_::import_("unisono.errors").attr(class_of(error.fault()));
    PyErr_SetObject(type.ptr(), text_of(error).ptr());
}

}  // namespace

nb::object text_of(const Error& error) {
    const std::string_view text = error.what();
    return nb::steal(
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

void register_errors(nb::module_&) {
    nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
        try {
            std::rethrow_exception(pointer);
        } catch (const Error& error) {
            set_python_error(error);
        }
    });
}

Error error_from(const nb::python_error& raised) {
    const std::string text = nb::cast<std::string>(nb::str(raised.value()));
    for (const Fault fault : {Fault::peer_lost, Fault::timeout, Fault::mismatch, Fault::aborted}) {
        const nb::object type = nb::module_::import_("unisono.errors").attr(class_of(fault));
        if (raised.matches(type)) return {fault, text};
    }
    const std::string kind = nb::cast<std::string>(nb::handle(raised.type()).attr("__name__"));
    return {Fault::system, kind + ": " + text};
}

Interrupted python_signals() {
    return [] {
        const WithGil gil;
        return PyErr_CheckSignals() != 0;
    };
}

}  // namespace unisono::bind
