// Bindings of windows: one-sided access to the arrays of other ranks.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bind/arrays.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/register.h"
#include "bind/whole.h"
#include "execution/group.h"
#include "one_sided/window.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {
namespace {

// Copies of fewer bytes take less time than the release of the GIL.
constexpr uint64_t kLeastWithoutGil = 8 << 10;

// Offset and bytes of a rank's array in its heap, the offset of its signals, and its number.
using PartTuple = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>;

// This rank's part of a window, with the group that it needs. The part takes the lock of the
// messages engine, whose holder may need the GIL: a message library is called from Python.
struct BoundPart {
    BoundPart(std::shared_ptr<Group> group, uint64_t array, uint64_t bytes, uint64_t signals)
        : group(std::move(group)) {
        const WithoutGil release;
        part.emplace(*this->group, HeapRange{array, bytes},
                     HeapRange{signals, Window::signal_bytes(this->group->members().ranks())});
    }
    BoundPart(const BoundPart&) = delete;
    BoundPart& operator=(const BoundPart&) = delete;
    ~BoundPart() {
        const WithoutGil release;
        part.reset();
    }
    std::shared_ptr<Group> group;
    std::optional<OwnPart> part;
};

class BoundWindow {
  public:
    BoundWindow(std::shared_ptr<BoundPart> own, const std::vector<PartTuple>& parts, uint32_t dtype)
        : own_(std::move(own)),
          dtype_(static_cast<DType>(dtype)),
          window_(*own_->group, parts_of(parts), size_of(dtype_)) {}

    // Copies `x` to a rank's array, and adds a signal. Returns None, or NotImplemented if Python
    // must check the arguments, or if the rank is on another host.
    nb::object put(nb::handle x, nb::handle dst, nb::handle at_element, nb::handle signals) {
        const auto rank = rank_of(dst);
        const auto start = offset_of(at_element);
        const auto from = located(x, false);
        if (!rank || !start || !from || !PyBool_Check(signals.ptr())) return unchecked();
        const bool adds = signals.is(Py_True);
        copy(from->bytes, [&] {
            window_.put(*rank, *start, at(from->address), from->bytes, none_);
            if (adds) window_.signal(*rank);
        });
        return nb::none();
    }
    // Copies `x` to the array of any rank. Python has checked the arguments.
    void put_checked(nb::handle x, uint32_t rank, uint64_t element, bool adds, double timeout_s) {
        const Located from = located(x, false).value();
        access(x, timeout_s, [&](RemoteWait& wait) {
            window_.put(rank, element * size_of(dtype_), at(from.address), from.bytes, wait);
            if (adds) window_.signal(rank);
        });
    }
    // Copies from a rank's array to `out`. Returns `out`, or NotImplemented.
    nb::object get(nb::handle out, nb::handle src, nb::handle at_element) {
        const auto rank = rank_of(src);
        const auto start = offset_of(at_element);
        const auto to = located(out, true);
        if (!rank || !start || !to) return unchecked();
        copy(to->bytes, [&] { window_.get(*rank, *start, at(to->address), to->bytes, none_); });
        return nb::borrow(out);
    }
    void get_checked(nb::handle out, uint32_t rank, uint64_t element, double timeout_s) {
        const Located to = located(out, true).value();
        access(out, timeout_s, [&](RemoteWait& wait) {
            window_.get(rank, element * size_of(dtype_), at(to.address), to.bytes, wait);
        });
    }
    void signal(uint32_t rank) {
        if (rank >= ranks() || !window_.is_away(rank)) return window_.signal(rank);
        const WithoutGil release;
        window_.signal(rank);
    }
    void wait(uint32_t rank, uint64_t count, double timeout_s) {
        const WithoutGil release;
        window_.wait(rank, count, timeout_s, python_signals());
    }
    [[nodiscard]] uint64_t arrived(uint32_t rank) const { return window_.arrived(rank); }
    void fence(double timeout_s) {
        const WithoutGil release;
        RemoteWait wait{timeout_s, python_signals()};
        window_.fence(wait);
    }

  private:
    static std::vector<Window::Part> parts_of(const std::vector<PartTuple>& tuples) {
        std::vector<Window::Part> parts;
        for (const auto& [array, bytes, signals, number] : tuples)
            parts.push_back({array, bytes, signals, number});
        return parts;
    }

    static nb::object unchecked() { return nb::borrow(Py_NotImplemented); }

    [[nodiscard]] std::optional<uint32_t> rank_of(nb::handle number) const {
        const auto rank = whole(number);
        if (!rank || *rank >= ranks()) return std::nullopt;
        if (window_.is_away(static_cast<uint32_t>(*rank))) return std::nullopt;
        return static_cast<uint32_t>(*rank);
    }
    [[nodiscard]] uint32_t ranks() const noexcept { return own_->group->members().ranks(); }

    // Returns the bytes before an element.
    [[nodiscard]] std::optional<uint64_t> offset_of(nb::handle element) const {
        constexpr int64_t kMost = int64_t{1} << 56;
        const auto number = whole(element);
        if (!number || *number > kMost) return std::nullopt;
        return static_cast<uint64_t>(*number) * size_of(dtype_);
    }

    [[nodiscard]] std::optional<Located> located(nb::handle array, bool writable) {
        auto found = arrays_.locate(array, writable);
        if (found && found->dtype != dtype_) found.reset();
        return found;
    }

    // Makes a copy. A range outside of the array is a ValueError of Python.
    template <class Copy>
    static void copy(uint64_t bytes, Copy&& copy) {
        try {
            if (bytes < kLeastWithoutGil) return copy();
            const WithoutGil release;
            copy();
        } catch (const Error& error) {
            if (error.fault() == Fault::invalid) throw nb::value_error(error.what());
            throw;
        }
    }

    // Accesses the array of any rank. If the access fails while the transport may still use
    // `memory`, keeps `memory` until the process ends.
    template <class Access>
    static void access(nb::handle memory, double timeout_s, Access&& access) {
        RemoteWait wait{timeout_s, python_signals()};
        try {
            copy(kLeastWithoutGil, [&] { access(wait); });
        } catch (...) {
            if (wait.needs_memory) memory.inc_ref();
            throw;
        }
    }

    std::shared_ptr<BoundPart> own_;
    DType dtype_;
    Arrays arrays_;
    Window window_;
    RemoteWait none_{};  // for ranks of this host, to which accesses never wait
};

}  // namespace

void register_windows(nb::module_& m) {
    m.def(
        "heap_offset",
        [](Group& group, Address address, uint64_t bytes) -> std::optional<uint64_t> {
            if (!group.heap().contains(at(address), bytes)) return std::nullopt;
            return group.heap().offset_of(at(address));
        },
        "group"_a, "address"_a, "bytes"_a);
    m.def("signal_bytes", &Window::signal_bytes, "ranks"_a);
    nb::class_<BoundPart>(m, "WindowPart")
        .def(nb::init<std::shared_ptr<Group>, uint64_t, uint64_t, uint64_t>(), "group"_a, "array"_a,
             "nbytes"_a, "signals"_a)
        .def_prop_ro("number", [](const BoundPart& part) { return part.part->number(); });
    nb::class_<BoundWindow>(m, "Window")
        .def(nb::init<std::shared_ptr<BoundPart>, const std::vector<PartTuple>&, uint32_t>(),
             "own"_a, "parts"_a, "dtype"_a)
        .def("put_checked", &BoundWindow::put_checked, "x"_a, "dst"_a, "at"_a, "signal"_a,
             "timeout_s"_a)
        .def("get_checked", &BoundWindow::get_checked, "out"_a, "src"_a, "at"_a, "timeout_s"_a)
        .def("put", &BoundWindow::put, "x"_a.none(), "dst"_a.none(), "at"_a.none(),
             "signal"_a.none())
        .def("get", &BoundWindow::get, "out"_a.none(), "src"_a.none(), "at"_a.none())
        .def("signal", &BoundWindow::signal, "rank"_a)
        .def("wait", &BoundWindow::wait, "rank"_a, "count"_a, "timeout_s"_a)
        .def("arrived", &BoundWindow::arrived, "rank"_a)
        .def("fence", &BoundWindow::fence, "timeout_s"_a);
}

}  // namespace unisono::bind
