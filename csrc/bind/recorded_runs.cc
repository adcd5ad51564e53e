// Collectives of a controller whose begin, waits and end are recorded in the rank's timeline. A
// controller runs this code for each collective.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bind/python_errors.h"
#include "bind/register.h"
#include "bind/timeline_ring.h"
#include "bind/voted_work.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {
namespace {

// The timeline of the runs, and the names of a pending job's methods (transfers/transfer.py).
struct Recorder {
    explicit Recorder(nb::object timeline) : ring(std::move(timeline)) {}

    void record(EventKind kind, const nb::str& name, int64_t number, int64_t value,
                int64_t begun_ns = 0, int64_t ended_ns = 0) const {
        nb::inst_ptr<TimelineRing>(ring)->record(kind, name, number, value, begun_ns, ended_ns);
    }

    nb::object ring;
    nb::str wait = interned("wait"), is_completed = interned("is_completed"), ran = interned("ran"),
            times_ns = interned("times_ns");
};

// A job that has begun. The first wait that succeeds records the end of the job.
class RecordedRun {
  public:
    RecordedRun(std::shared_ptr<const Recorder> recorder, nb::object pending, nb::str name,
                int64_t number, int64_t launched_ns)
        : recorder_(std::move(recorder)),
          pending_(std::move(pending)),
          name_(std::move(name)),
          number_(number),
          launched_ns_(launched_ns) {
        if (nb::isinstance<VotedWork>(pending_)) voted_work_ = nb::inst_ptr<VotedWork>(pending_);
    }

    nb::object wait(const nb::object& timeout_s) {
        if (recorded_) return wait_for_job(timeout_s);
        const int64_t begun_ns = steady_now_ns();
        nb::object result;
        try {
            result = wait_for_job(timeout_s);
        } catch (...) {
            const nb::error_scope current;  // an error that a signal handler has set
            record(EventKind::waited, 0, begun_ns, steady_now_ns());
            throw;
        }
        const int64_t ended_ns = steady_now_ns();
        record(EventKind::waited, 0, begun_ns, ended_ns);
        if (std::exchange(recorded_, true)) return result;
        const auto [moved_ns, moved_until_ns] =
            times_ns().value_or(std::make_pair(launched_ns_, ended_ns));
        record(EventKind::transferred, ran(), moved_ns, moved_until_ns);
        return result;
    }

    [[nodiscard]] bool is_completed() const {
        if (voted_work_) return voted_work_->done();
        return nb::cast<bool>(pending_.attr(recorder_->is_completed)());
    }
    [[nodiscard]] bool ran() const {
        if (voted_work_) return voted_work_->ran();
        const nb::object found = attribute(pending_, recorder_->ran);
        return !found.is_valid() || nb::cast<bool>(found);
    }
    [[nodiscard]] std::optional<std::pair<int64_t, int64_t>> times_ns() const {
        if (voted_work_) return voted_work_->times_ns();
        const nb::object found = attribute(pending_, recorder_->times_ns);
        if (!found.is_valid()) return std::nullopt;
        return nb::cast<std::optional<std::pair<int64_t, int64_t>>>(found());
    }

  private:
    [[nodiscard]] nb::object wait_for_job(const nb::object& timeout_s) const {
        if (voted_work_) {
            voted_work_->wait(pending_, nb::cast<std::optional<double>>(timeout_s));
            return nb::none();
        }
        PyObject* arguments[] = {pending_.ptr(), timeout_s.ptr()};
        nb::object result = nb::steal(PyObject_VectorcallMethod(
            recorder_->wait.ptr(), arguments, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
        if (!result.is_valid()) nb::raise_python_error();
        return result;
    }
    void record(EventKind kind, int64_t value, int64_t begun_ns, int64_t ended_ns) const {
        recorder_->record(kind, name_, number_, value, begun_ns, ended_ns);
    }

    std::shared_ptr<const Recorder> recorder_;
    nb::object pending_;
    // `pending_` if it is a VotedWork, else null. Calls of a VotedWork do not go through Python.
    VotedWork* voted_work_ = nullptr;
    nb::str name_;
    int64_t number_, launched_ns_;
    bool recorded_ = false;
};

// A voted job that reduces a bucket of a frozen plan. Records each run, and in every 32nd run, from
// the first run on, also the tensors of the bucket.
class RecordedVotedJob {
  public:
    // `bucket` is the number of the bucket. `names` are its tensors, and `lengths` their bytes.
    // `next_number()` returns a number for a run. A void run has the name `no_tensor`.
    RecordedVotedJob(std::shared_ptr<const Recorder> recorder, nb::object job, int64_t bucket,
                     nb::callable next_number, std::vector<nb::str> names,
                     std::vector<int64_t> lengths, nb::str no_tensor)
        : recorder_(std::move(recorder)),
          begin_(job.attr("begin")),
          begin_void_(job.attr("begin_void")),
          bucket_(bucket),
          next_number_(std::move(next_number)),
          names_(std::move(names)),
          lengths_(std::move(lengths)),
          no_tensor_(std::move(no_tensor)) {}

    RecordedRun begin(const nb::tuple& arrays) {
        if (runs_++ % kRunsPerTensorList == 0) record_plan();
        const nb::str& first = names_.empty() ? no_tensor_ : names_.front();
        const auto number = nb::cast<int64_t>(next_number_());
        recorder_->record(EventKind::launched, first, number, bucket_);
        const int64_t launched_ns = steady_now_ns();
        return {recorder_, begin_(arrays), first, number, launched_ns};
    }

    RecordedRun begin_void() {
        const auto number = nb::cast<int64_t>(next_number_());
        recorder_->record(EventKind::launched, no_tensor_, number, 0);
        const int64_t launched_ns = steady_now_ns();
        return {recorder_, begin_void_(), no_tensor_, number, launched_ns};
    }

  private:
    static constexpr uint64_t kRunsPerTensorList = 32;

    void record_plan() const {
        for (size_t i = 0; i < names_.size() && i < lengths_.size(); ++i)
            recorder_->record(EventKind::planned, names_[i], bucket_, lengths_[i]);
    }

    std::shared_ptr<const Recorder> recorder_;
    nb::object begin_, begin_void_;
    int64_t bucket_;
    nb::callable next_number_;
    std::vector<nb::str> names_;
    std::vector<int64_t> lengths_;
    nb::str no_tensor_;
    uint64_t runs_ = 0;
};

}  // namespace

void register_recorded_runs(nb::module_& m) {
    nb::class_<RecordedRun>(m, "RecordedRun")
        .def("wait", &RecordedRun::wait, "timeout_s"_a = nb::none())
        .def("is_completed", &RecordedRun::is_completed)
        .def_prop_ro("ran", &RecordedRun::ran)
        .def("times_ns", &RecordedRun::times_ns);
    nb::class_<RecordedVotedJob>(m, "RecordedVotedJob")
        .def("begin", &RecordedVotedJob::begin, "arrays"_a)
        .def("begin_void", &RecordedVotedJob::begin_void);
    nb::class_<Recorder>(m, "RunRecorder")
        .def(
            "__init__",
            [](Recorder* self, nb::handle_t<TimelineRing> ring) {
                new (self) Recorder(nb::borrow(ring));
            },
            "ring"_a)
        .def(
            "run",
            [](std::shared_ptr<Recorder> self, nb::object pending, nb::str name, int64_t number,
               int64_t launched_ns) {
                return RecordedRun(std::move(self), std::move(pending), std::move(name), number,
                                   launched_ns);
            },
            "pending"_a, "name"_a, "number"_a, "launched_ns"_a)
        .def(
            "job",
            [](std::shared_ptr<Recorder> self, nb::object job, int64_t bucket,
               nb::callable next_number, std::vector<nb::str> names, std::vector<int64_t> lengths,
               nb::str no_tensor) {
                return RecordedVotedJob(std::move(self), std::move(job), bucket,
                                        std::move(next_number), std::move(names),
                                        std::move(lengths), std::move(no_tensor));
            },
            "job"_a, "bucket"_a, "next_number"_a, "names"_a, "lengths"_a, "no_tensor"_a);
}

}  // namespace unisono::bind
