// Submits the tensors of a frozen plan. A controller runs this code for every tensor of
// such a plan.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "bind/arrays.h"
#include "bind/python_errors.h"
#include "bind/register.h"
#include "bind/slot.h"
#include "bind/timeline_ring.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {
namespace {

bool equal(nb::handle a, nb::handle b) {
    if (a.is(b)) return true;
    const int found = PyObject_RichCompareBool(a.ptr(), b.ptr(), Py_EQ);
    if (found < 0) clear_error();
    return found == 1;
}

// A tensor of the plan. `planned` and `bucket` are the objects of frozen_plan.py.
struct Tensor {
    nb::object planned, bucket, request, shape, reduction;
    std::vector<int64_t> lengths;  // of the dimensions, as in `shape`
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

// The slots of the Python classes of handle.py and frozen_plan.py.
struct Slots {
    Slots(nb::handle handle, nb::handle tensor, nb::handle bucket)
        : owner(handle, interned("_owner")),
          request(handle, interned("request")),
          array(handle, interned("array")),
          result(handle, interned("_result")),
          flight(handle, interned("flight")),
          error(handle, interned("_error")),
          done(handle, interned("_done")),
          current(tensor, interned("handle")),
          dtype(tensor, interned("dtype")),
          missing(bucket, interned("missing")) {}

    Slot owner, request, array, result, flight, error, done, current, dtype, missing;
};

// Recognises tensors of the plan, makes their handles, and counts the tensors that each bucket
// lacks. The GIL guards this class: no Python code runs while it changes the plan.
class PlannedTensors {
  public:
    // `handle`, `tensor` and `bucket` are the classes of the plan's objects. `open` maps each
    // tensor name to its most recent handle. `launch()` launches the full buckets. `ring` records
    // the submissions, unless it is None.
    PlannedTensors(nb::type_object handle, nb::type_object tensor, nb::type_object bucket,
                   nb::object owner, nb::dict open, nb::callable launch, nb::object ring)
        : handle_(std::move(handle)),
          slots_(handle_, tensor, bucket),
          loop_(std::make_shared<Loop>(std::move(owner), std::move(open), std::move(launch))),
          ring_(std::move(ring)) {}

    // Accepts the tensors of a plan from now on. Does nothing after close().
    void follow(const nb::iterable& tensors) {
        auto plan = std::make_shared<Plan>();
        for (const nb::handle each : tensors) {
            const nb::object bucket = each.attr("bucket");
            if (!slots_.current.is_of(each) || !slots_.missing.is_of(bucket))
                throw nb::type_error("expected tensors of a frozen plan");
            plan->numbers[each.attr("request").attr("name")] = plan->tensors.size();
            plan->tensors.push_back({nb::borrow(each), bucket, each.attr("request"),
                                     each.attr("shape"), each.attr("reduction"),
                                     nb::cast<std::vector<int64_t>>(each.attr("shape")),
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
        slots_.current.set(tensor.planned, handle);
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
    [[nodiscard]] bool fits(const Tensor& tensor, nb::handle array, nb::handle op) const {
        // Python stores the `dtype` object of the last array that fitted the plan. An array with
        // another `dtype` object takes the slower path, where Python checks its element type.
        const nb::object known = slots_.dtype.get(tensor.planned);
        return (arrays_.is_plain(array, known, tensor.lengths) || has(array, known, tensor)) &&
               equal(op, tensor.reduction) && !arrays_.is_read_only(array);
    }

    [[nodiscard]] bool has(nb::handle array, nb::handle dtype, const Tensor& tensor) const {
        const nb::object shape = attribute(array, shape_), type = attribute(array, dtype_);
        return shape.is_valid() && type.is(dtype) && equal(shape, tensor.shape);
    }

    [[nodiscard]] bool is_under_way(const Loop& loop, nb::handle name) const {
        const nb::handle before = PyDict_GetItemWithError(loop.open.ptr(), name.ptr());
        return before.is_valid() && slots_.done.get(before).ptr() != Py_True;
    }

    // Returns a handle equal to the result of Handle.__init__, in less time.
    [[nodiscard]] nb::object handle_of(const Loop& loop, const Tensor& tensor,
                                       nb::handle array) const {
        nb::object handle =
            nb::steal(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(handle_.ptr()), 0));
        if (!handle.is_valid()) nb::raise_python_error();
        slots_.owner.set(handle, loop.owner);
        slots_.request.set(handle, tensor.request);
        slots_.array.set(handle, array);
        slots_.result.set(handle, array);
        slots_.flight.set(handle, Py_None);
        slots_.error.set(handle, Py_None);
        slots_.done.set(handle, Py_False);
        return handle;
    }

    // Reduces the number of tensors that the bucket still lacks by one. Returns true if the bucket
    // now has all of its tensors.
    [[nodiscard]] bool add_to(nb::handle bucket) const {
        const auto missing = nb::cast<int64_t>(slots_.missing.get(bucket)) - 1;
        slots_.missing.set(bucket, nb::int_(missing));
        return missing == 0;
    }

    void record(nb::handle name, int64_t bytes) const {
        nb::inst_ptr<TimelineRing>(ring_)->record(EventKind::submitted, nb::borrow<nb::str>(name),
                                                  0, bytes);
    }

    nb::type_object handle_;
    Slots slots_;
    Arrays arrays_;
    std::shared_ptr<Loop> loop_;
    nb::object ring_;
    std::shared_ptr<Plan> plan_;
    int64_t count_ = 0, bytes_ = 0;
    nb::str shape_ = interned("shape"), dtype_ = interned("dtype");
};

}  // namespace

void register_planned_tensors(nb::module_& m) {
    nb::class_<PlannedTensors>(m, "PlannedTensors")
        .def(nb::init<nb::type_object, nb::type_object, nb::type_object, nb::object, nb::dict,
                      nb::callable, nb::object>(),
             "handle"_a, "tensor"_a, "bucket"_a, "owner"_a, "open"_a, "launch"_a, "ring"_a.none())
        .def("follow", &PlannedTensors::follow, "tensors"_a)
        .def("leave", &PlannedTensors::leave)
        .def("close", &PlannedTensors::close)
        .def("submit", &PlannedTensors::submit, "name"_a.none(), "array"_a.none(), "op"_a.none())
        .def_prop_ro("count", &PlannedTensors::count)
        .def_prop_ro("bytes", &PlannedTensors::bytes);
}

}  // namespace unisono::bind
