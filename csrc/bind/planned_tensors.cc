// Submits the tensors of a frozen plan. A controller runs this code for every tensor of
// such a plan.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "bind/python_errors.h"
#include "bind/register.h"
#include "bind/timeline_ring.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {
namespace {

// Returns an attribute, or null after an error. The error is cleared here, because the slower
// Python code that runs instead will raise it again.
nb::object attribute(nb::handle of, const nb::str& name) {
    nb::object found = nb::steal(PyObject_GetAttr(of.ptr(), name.ptr()));
    if (!found.is_valid()) clear_error();
    return found;
}

void set(nb::handle of, const nb::str& name, nb::handle value) {
    if (PyObject_SetAttr(of.ptr(), name.ptr(), value.ptr()) != 0) nb::raise_python_error();
}

bool equal(nb::handle a, nb::handle b) {
    if (a.is(b)) return true;
    const int found = PyObject_RichCompareBool(a.ptr(), b.ptr(), Py_EQ);
    if (found < 0) clear_error();
    return found == 1;
}

// A tensor of the plan. `planned` and `bucket` are the objects of frozen_plan.py.
struct Tensor {
    nb::object planned, bucket, request, shape, reduction;
    int64_t bytes;
};

// The objects of the controller's loop (loop.py) that a submission needs. They form a reference
// cycle: they refer to the loop, and the loop refers to PlannedTensors.
struct Loop {
    nb::object owner;
    nb::dict open;
    nb::callable launch;
};

struct Plan {
    std::shared_ptr<Loop> loop;
    nb::dict numbers;  // index of each tensor, by name
    std::vector<Tensor> tensors;
};

// Recognises tensors of the plan, makes their handles, and counts the tensors that each bucket
// lacks. The GIL guards this class: no Python code runs while it changes the plan.
class PlannedTensors {
  public:
    // `open` maps each tensor name to its most recent handle. `launch()` launches the full buckets.
    // `ring` records the submissions, unless it is None.
    PlannedTensors(nb::type_object handle, nb::object owner, nb::dict open, nb::callable launch,
                   nb::object ring)
        : handle_(std::move(handle)),
          loop_(std::make_shared<Loop>(std::move(owner), std::move(open), std::move(launch))),
          ring_(std::move(ring)) {}

    // Accepts the tensors of a plan from now on. Does nothing after close().
    void follow(const nb::iterable& tensors) {
        auto plan = std::make_shared<Plan>();
        for (const nb::handle each : tensors) {
            plan->numbers[each.attr("request").attr("name")] = plan->tensors.size();
            plan->tensors.push_back({nb::borrow(each), each.attr("bucket"), each.attr("request"),
                                     each.attr("shape"), each.attr("reduction"),
                                     nb::cast<int64_t>(each.attr("nbytes"))});
        }
        // The Python code above may have called close().
        plan->loop = loop_;
        if (loop_) plan_ = std::move(plan);
    }

    // Accepts no tensors from now on.
    void leave() noexcept { plan_.reset(); }

    // Accepts no tensors from now on, and drops all references. This cannot be undone.
    void close() {
        leave();
        loop_.reset();
    }

    // Submits an all_reduce and returns its handle. Returns None if Python must submit it: if there
    // is no plan, or if the tensor is not in the plan, differs from the plan, or is still pending.
    nb::object submit(nb::handle name, nb::handle array, nb::handle op) {
        const std::shared_ptr<Plan> plan = plan_;
        if (!plan || !PyUnicode_CheckExact(name.ptr())) return nb::none();
        PyObject* number = PyDict_GetItemWithError(plan->numbers.ptr(), name.ptr());
        if (number == nullptr) return nb::none();
        const Tensor& tensor = plan->tensors[PyLong_AsSize_t(number)];
        const Loop& loop = *plan->loop;
        if (!fits(tensor, array, op)) return nb::none();
        nb::object handle = handle_of(loop, tensor, array);
        // Python code may have run before this line: the plan may have ended, or the tensor may
        // have been submitted.
        if (plan != plan_ || is_under_way(loop, name)) return nb::none();
        // Kept alive until this function returns.
        const nb::object before = nb::borrow(PyDict_GetItemWithError(loop.open.ptr(), name.ptr()));
        if (PyDict_SetItem(loop.open.ptr(), name.ptr(), handle.ptr()) != 0)
            nb::raise_python_error();
        set(tensor.planned, handle_name_, handle);
        const bool is_full = add_to(tensor.bucket);
        ++count_;
        bytes_ += tensor.bytes;
        if (!ring_.is_none()) record(name, tensor.bytes);
        if (is_full) loop.launch();
        return handle;
    }

    [[nodiscard]] int64_t count() const noexcept { return count_; }
    [[nodiscard]] int64_t bytes() const noexcept { return bytes_; }

  private:
    static constexpr uint16_t kSubmitted = 1;  // event kind of src/unisono/timeline/event_kinds.py

    [[nodiscard]] bool fits(const Tensor& tensor, nb::handle array, nb::handle op) const {
        const nb::object shape = attribute(array, shape_), dtype = attribute(array, dtype_);
        if (!shape.is_valid() || !dtype.is_valid()) return false;
        // Python stores the `dtype` object of the last array that fitted the plan. An array with
        // another `dtype` object takes the slower path, where Python checks its element type.
        return attribute(tensor.planned, dtype_).is(dtype) && equal(shape, tensor.shape) &&
               equal(op, tensor.reduction);
    }

    [[nodiscard]] bool is_under_way(const Loop& loop, nb::handle name) const {
        const nb::handle before = PyDict_GetItemWithError(loop.open.ptr(), name.ptr());
        return before.is_valid() && !attribute(before, done_).is(nb::bool_(true));
    }

    // Returns a handle equal to the result of Handle.__init__, in less time.
    [[nodiscard]] nb::object handle_of(const Loop& loop, const Tensor& tensor,
                                       nb::handle array) const {
        nb::object handle =
            nb::steal(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(handle_.ptr()), 0));
        if (!handle.is_valid()) nb::raise_python_error();
        set(handle, owner_, loop.owner);
        set(handle, request_, tensor.request);
        set(handle, array_, array);
        set(handle, result_, array);
        set(handle, flight_, nb::none());
        set(handle, error_, nb::none());
        set(handle, done_, nb::bool_(false));
        return handle;
    }

    // Reduces the number of tensors that the bucket still lacks by one. Returns true if the bucket
    // now has all of its tensors.
    [[nodiscard]] bool add_to(nb::handle bucket) const {
        const auto missing = nb::cast<int64_t>(attribute(bucket, missing_)) - 1;
        set(bucket, missing_, nb::int_(missing));
        return missing == 0;
    }

    void record(nb::handle name, int64_t bytes) const {
        nb::inst_ptr<TimelineRing>(ring_)->record(kSubmitted, nb::borrow<nb::str>(name), 0, bytes,
                                                  0, 0);
    }

    nb::type_object handle_;
    std::shared_ptr<Loop> loop_;
    nb::object ring_;
    std::shared_ptr<Plan> plan_;
    int64_t count_ = 0, bytes_ = 0;
    nb::str owner_ = interned("_owner"), request_ = interned("request"), array_ = interned("array"),
            result_ = interned("_result"), flight_ = interned("flight"),
            error_ = interned("_error"), done_ = interned("_done"),
            handle_name_ = interned("handle"), missing_ = interned("missing"),
            shape_ = interned("shape"), dtype_ = interned("dtype");
};

}  // namespace

void register_planned_tensors(nb::module_& m) {
    nb::class_<PlannedTensors>(m, "PlannedTensors")
        .def(nb::init<nb::type_object, nb::object, nb::dict, nb::callable, nb::object>(),
             "handle"_a, "owner"_a, "open"_a, "launch"_a, "ring"_a.none())
        .def("follow", &PlannedTensors::follow, "tensors"_a)
        .def("leave", &PlannedTensors::leave)
        .def("close", &PlannedTensors::close)
        .def("submit", &PlannedTensors::submit, "name"_a.none(), "array"_a.none(), "op"_a.none())
        .def_prop_ro("count", &PlannedTensors::count)
        .def_prop_ro("bytes", &PlannedTensors::bytes);
}

}  // namespace unisono::bind
