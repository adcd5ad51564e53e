// A message library that is a Python object. Each call to it needs the GIL.
#include "bind/message_libraries.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <type_traits>

#include "bind/errors.h"
#include "bind/gil.h"
#include "transport/message_library.h"
#include "transport/message_transport.h"

namespace nb = nanobind;

namespace unisono::bind {
namespace {

// Calls into Python and converts its exceptions to errors of the core.
template <class Call>
auto in_python(Call&& call) {
    const WithGil gil;
    try {
        return call();
    } catch (const nb::python_error& raised) {
        throw_error_of(raised);
    } catch (const nb::cast_error&) {
        throw Error(Fault::system,
                    "a method of the message library returned a value of the wrong type: see "
                    "MessageLibrary in _native.pyi");
    }
}

class PythonMessageLibrary final : public MessageLibrary {
    // Calls a method that moves messages. An error other than `peer_lost` may come from a signal
    // handler that interrupted the method at any point. The library may then have begun a transfer
    // that the Python object has not recorded and cannot cancel, so the library counts as broken.
    template <class Call>
    std::invoke_result_t<Call&> moving(Call&& call) {
        try {
            return in_python(call);
        } catch (const Error& error) {
            is_broken_ = is_broken_ || error.fault() != Fault::peer_lost;
            throw;
        }
    }

  public:
    explicit PythonMessageLibrary(const nb::object& library)
        : library_(library),
          reuse_(library.attr("reuse")),
          send_head_(library.attr("send_head")),
          send_(library.attr("send")),
          receive_(library.attr("receive")),
          poll_(library.attr("poll")) {}
    PythonMessageLibrary(const PythonMessageLibrary&) = delete;
    PythonMessageLibrary& operator=(const PythonMessageLibrary&) = delete;
    ~PythonMessageLibrary() override {
        const WithGil gil;
        for (nb::object* object : {&poll_, &receive_, &send_, &send_head_, &reuse_, &library_})
            object->reset();
    }

    void listen(std::byte* memory, uint64_t slot_bytes, uint32_t slots) override {
        in_python([&] { library_.attr("listen")(address_of(memory), slot_bytes, slots); });
    }
    void reuse() override {
        moving([&] { reuse_(); });
    }
    bool send_head(uint32_t peer, const std::byte* data, uint64_t bytes, uint64_t ticket) override {
        return move(send_head_, peer, data, bytes, ticket);
    }
    bool send(uint32_t peer, const std::byte* data, uint64_t bytes, uint64_t ticket) override {
        return move(send_, peer, data, bytes, ticket);
    }
    bool receive(uint32_t peer, std::byte* data, uint64_t bytes, uint64_t ticket) override {
        return move(receive_, peer, data, bytes, ticket);
    }
    uint32_t poll(std::vector<Ended>& ended) override {
        return moving([&] {
            const nb::object found = poll_();
            if (PyLong_CheckExact(found.ptr())) return nb::cast<uint32_t>(found);
            const auto [filled, over] = nb::cast<std::pair<uint32_t, nb::list>>(found);
            for (const nb::handle one : over) {
                const auto [ticket, why] = nb::cast<std::pair<uint64_t, std::string>>(one);
                ended.push_back({ticket, why});
            }
            return filled;
        });
    }
    [[nodiscard]] bool close() noexcept override {
        try {
            return in_python([&] {
                const nb::error_scope raised;  // keeps the exception of a signal handler
                return nb::cast<bool>(library_.attr("close")()) && !is_broken_;
            });
        } catch (const std::exception&) {  // transfers may still be pending
            return false;
        }
    }

  private:
    static uintptr_t address_of(const std::byte* data) noexcept {
        return reinterpret_cast<uintptr_t>(data);
    }
    bool move(const nb::object& method, uint32_t peer, const std::byte* data, uint64_t bytes,
              uint64_t ticket) {
        return moving(
            [&] { return nb::cast<bool>(method(peer, address_of(data), bytes, ticket)); });
    }

    bool is_broken_ = false;
    nb::object library_, reuse_, send_head_, send_, receive_, poll_;
};

// Holds a Python object for threads that may not have the GIL.
std::shared_ptr<void> hold(const nb::object& object) {
    return {nb::object(object).release().ptr(), [](void* held) {
                const WithGil gil;
                Py_DECREF(static_cast<PyObject*>(held));
            }};
}

}  // namespace

MakeTransport transports_of(const nb::object& make_library) {
    if (make_library.is_none()) return {};
    const auto held = hold(make_library);  // kept as long as the group
    return [held](TransportKind kind, View& view, Receiver& receiver) {
        return in_python([&] {
            const nb::handle make(static_cast<PyObject*>(held.get()));
            const nb::object library = make(static_cast<uint32_t>(kind));
            return std::make_unique<MessageTransport>(
                view, receiver, std::make_unique<PythonMessageLibrary>(library));
        });
    };
}

}  // namespace unisono::bind
