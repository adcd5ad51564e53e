#include "bind/errors.h"

#include <nanobind/stl/string.h>

#include <string>
#include <string_view>
#include <utility>

#include "bind/gil.h"

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

std::string name_of(const nb::python_error& raised) {
    return nb::cast<std::string>(nb::handle(raised.type()).attr("__name__"));
}

void set_python_error(const Error& error) {
    if (error.fault() == Fault::interrupted && PyErr_Occurred())
        return;  // a signal handler has already set the exception
    const nb::object exception = exception_of(error);
    PyErr_SetObject(exception.type().ptr(), exception.ptr());
}

// A Python exception that passes through the core.
class Interruption final : public Error {
  public:
    explicit Interruption(nb::python_error raised)
        : Error(Fault::interrupted, "interrupted by " + name_of(raised)),
          raised_(std::move(raised)) {}
    void restore() const {
        nb::python_error raised = raised_;
        raised.restore();
    }

  private:
    nb::python_error raised_;
};

}  // namespace

nb::object text_of(const Error& error) {
    const std::string_view text = error.what();
    return nb::steal(
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

nb::object exception_of(const Error& error) {
    return nb::module_::import_("unisono.errors").attr(class_of(error.fault()))(text_of(error));
}

void register_errors(nb::module_&) {
    nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
        try {
            std::rethrow_exception(pointer);
        } catch (const Interruption& interruption) {
            interruption.restore();
        } catch (const Error& error) {
            set_python_error(error);
        }
    });
}

void throw_error_of(const nb::python_error& raised) {
    if (!raised.matches(PyExc_Exception)) throw Interruption(raised);
    const std::string text = nb::cast<std::string>(nb::str(raised.value()));
    for (const Fault fault : {Fault::peer_lost, Fault::timeout, Fault::mismatch, Fault::aborted}) {
        const nb::object type = nb::module_::import_("unisono.errors").attr(class_of(fault));
        if (raised.matches(type)) throw Error(fault, text);
    }
    throw Error(Fault::system, name_of(raised) + ": " + text);
}

void raise_late(const char* what, double limit_s) {
    const std::string text = std::string(what) + " still under way: " + timeout_text(limit_s);
    PyErr_SetString(PyExc_TimeoutError, text.c_str());
    throw nb::python_error();
}

Interrupted python_signals() {
    return [] {
        const WithGil gil;
        return PyErr_CheckSignals() != 0;
    };
}

}  // namespace unisono::bind
