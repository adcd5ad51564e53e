// The group of a communicator for programs in C; see capi/unisono.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>
#include <utility>

#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/register.h"
#include "capi/handed_group.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {
namespace {

// Throws the exception of Python as an error of the core.
[[noreturn]] void throw_to_c(const nb::python_error& raised) {
    const auto text = [&] { return nb::cast<std::string>(nb::str(raised.value())); };
    const nb::object unsupported = nb::module_::import_("unisono.errors").attr("UnsupportedError");
    if (raised.matches(unsupported)) throw Error(Fault::unsupported, text());
    for (PyObject* const wrong : {PyExc_ValueError, PyExc_TypeError, PyExc_OverflowError})
        if (raised.matches(wrong)) throw Error(Fault::invalid, text());
    throw_error_of(raised);
}

// Calls Python with the GIL. Throws its exceptions as errors of the core.
template <class Ask>
auto asked(Ask&& ask) {
    const WithGil gil;
    try {
        return ask();
    } catch (const nb::python_error& raised) {
        throw_to_c(raised);
    }
}

// Asks an object of Python, `unisono.communicator.c_interface.Owner`.
class PythonOwner final : public capi::Owner {
  public:
    explicit PythonOwner(nb::object owner) : owner_(std::move(owner)) {}
    ~PythonOwner() override {
        const WithGil gil;
        owner_.reset();
    }

    std::shared_ptr<const Prepared> prepare(const unisono_collective& made) override {
        return asked([&] {
            return nb::cast<std::shared_ptr<Prepared>>(
                owner_.attr("prepare")(made.op, made.dtype, made.reduction, made.root, made.count));
        });
    }
    unisono_group* split(int32_t color, int32_t key) override {
        return asked([&]() -> unisono_group* {
            const nb::object capsule = owner_.attr("split")(color, key);
            if (capsule.is_none()) return nullptr;
            auto* const part = static_cast<unisono_group*>(nb::cast<nb::capsule>(capsule).data());
            part->api->retain(part);
            return part;
        });
    }
    void reach(int32_t peer) override {
        asked([&] { owner_.attr("reach")(peer); });
    }

  private:
    nb::object owner_;
};

void release(void* group) noexcept {
    auto* const handed = static_cast<unisono_group*>(group);
    handed->api->release(handed);
}

}  // namespace

void register_c_interface(nb::module_& m) {
    m.def(
        "c_group",
        [](std::shared_ptr<Group> group, nb::object owner) {
            auto asks = std::make_unique<PythonOwner>(std::move(owner));
            return nb::capsule(capi::hand_over(std::move(group), std::move(asks)), UNISONO_CAPSULE,
                               release);
        },
        "group"_a, "owner"_a);
}

}  // namespace unisono::bind
