// The fast path. A call with the same properties as an earlier, checked call runs without Python
// code. The fast path executes the call, begins it, or records it for a batch.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <functional>
#include <optional>
#include <unordered_map>
#include <utility>

#include "bind/arrays.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/pack.h"
#include "bind/register.h"
#include "execution/group.h"
#include "execution/overlap_rule.h"
#include "execution/prepared_call.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {
namespace {

constexpr size_t kMostRemembered = 4096;

// The properties by which the fast path finds a call. Reduction and algorithm are compared by
// identity, because programs usually pass constants. If a program passes new objects, the call
// takes the checked path, with the same result.
struct CallKey {
    uint32_t op;
    uint64_t in_bytes, out_bytes;
    DType in_type, out_type;
    PyObject* reduction;
    int32_t root;
    PyObject* algorithm;
    bool operator==(const CallKey&) const = default;
};

struct CallKeyHash {
    size_t operator()(const CallKey& k) const noexcept {
        const auto mix = [](size_t h, size_t v) { return (h ^ v) * 0x9e3779b97f4a7c15ULL; };
        size_t h =
            mix(k.op | static_cast<size_t>(k.in_type) << 8 | static_cast<size_t>(k.out_type) << 16,
                k.in_bytes);
        h = mix(h, k.out_bytes);
        h = mix(h ^ (h >> 29), reinterpret_cast<size_t>(k.reduction) + static_cast<size_t>(k.root));
        h = mix(h, reinterpret_cast<size_t>(k.algorithm));
        return h ^ (h >> 32);
    }
};

struct Known {
    std::shared_ptr<Prepared> call;
    nb::object reduction, algorithm;  // kept alive, so that no other object gets their addresses
};

CallKey key_of(uint32_t op, const Located& in, const Located& out, nb::handle reduction,
               int32_t root, nb::handle algorithm) {
    return {op, in.bytes, out.bytes, in.dtype, out.dtype, reduction.ptr(), root, algorithm.ptr()};
}

Located located(const nb::tuple& t) {
    return {nb::cast<uintptr_t>(t[0]), nb::cast<uint64_t>(t[1]),
            static_cast<DType>(nb::cast<uint32_t>(t[2]))};
}

class FastPath {
  public:
    // `make_work(op, (in, out), result)` makes the `Work` object that an asynchronous call returns.
    // This class then sets the `job` of that object. A work stays in the set `held` until it is
    // finished, and keeps its arrays alive. `prune()` removes the finished works from `held`.
    FastPath(std::shared_ptr<Group> group, nb::callable make_work, nb::set held, nb::callable prune,
             double inline_s)
        : group_(std::move(group)),
          make_work_(std::move(make_work)),
          held_(std::move(held)),
          prune_(std::move(prune)),
          inline_s_(inline_s) {}

    double timeout_s = 0;

    void learn(const CallKey& key, Known known) {
        if (known_.size() >= kMostRemembered) known_.clear();
        known_.insert_or_assign(key, std::move(known));
    }

    // Runs the call and returns `out`, or begins the call and returns its work. Returns None for an
    // unknown call, and for arguments of a wrong type: Python checks these arguments and informs
    // the other ranks. Runs no call while this thread records.
    nb::object run(uint32_t op, nb::handle in, nb::handle out, nb::handle reduction,
                   nb::handle root, nb::handle algorithm, nb::handle later) {
        const auto number = whole(root);
        if (!number) return nb::none();
        const int async_op = PyObject_IsTrue(later.ptr());
        if (async_op < 0) {
            PyErr_Clear();
            return nb::none();
        }
        const auto found = find(op, in, out, reduction, *number, algorithm);
        if (recording_ && recording_->thread == PyThread_get_thread_ident())
            return found && !async_op && record(*found, out) ? nb::borrow(out) : nb::none();
        if (!found) return nb::none();
        Execution call = group_->dispatcher().or_fail(
            [&] { return found->call->bind(at(found->source), at(found->target)); });
        const double limit_s = timeout_s;
        if (async_op) return begin(op, in, out, std::move(call), limit_s);
        {
            const WithoutGil release;
            group_->dispatcher().run(std::move(call), limit_s, python_signals());
        }
        return nb::borrow(out);
    }

    // Starts recording this thread's calls instead of running them. An all_reduce goes into the
    // pack for its type and reduction, if there is such a pack. All other calls take the checked
    // path.
    void start_recording() { recording_ = Recording{PyThread_get_thread_ident(), {}}; }
    void stop_recording() { recording_.reset(); }
    void pack_into(uint32_t dtype, uint32_t reduction, uint64_t most_bytes,
                   std::shared_ptr<Pack> pack) {
        recording_.value().kinds.push_back({static_cast<DType>(dtype),
                                            static_cast<ReduceOp>(reduction), most_bytes,
                                            std::move(pack)});
    }

  private:
    struct Found {
        const Prepared* call;
        bool plain;  // true: the caller has not chosen the algorithm
        Address source, target;
        uint64_t bytes;
    };
    struct Kind {
        DType dtype;
        ReduceOp reduction;
        uint64_t most_bytes;
        std::shared_ptr<Pack> pack;
    };
    struct Recording {
        unsigned long thread;
        std::vector<Kind> kinds;
    };

    // Begins an asynchronous call. Between the start of the call and the storing of its arrays in
    // `held`, no Python code runs, because a signal handler could interrupt such code.
    nb::object begin(uint32_t op, nb::handle in, nb::handle out, Execution call, double limit_s) {
        nb::object work = make_work_(op, nb::make_tuple(in, out), out);
        std::shared_ptr<Job> job;
        {
            const WithoutGil release;
            job = group_->dispatcher().submit(std::move(call), limit_s, inline_s_);
        }
        const bool done = job->done();
        if (!done) keep_in(held_, work);
        work.attr("job") = std::move(job);
        if (!done)
            work.attr("storages") = nb::make_tuple(arrays_.storage_of(in), arrays_.storage_of(out));
        if (!done) prune_();
        return work;
    }

    static std::optional<int32_t> whole(nb::handle number) {
        int overflow = 0;
        const long value = PyLong_AsLongAndOverflow(number.ptr(), &overflow);
        const bool fits = std::in_range<int32_t>(value) && overflow == 0;
        if (fits && (value != -1 || !PyErr_Occurred())) return static_cast<int32_t>(value);
        PyErr_Clear();
        return std::nullopt;
    }

    [[nodiscard]] std::optional<Found> find(uint32_t op, nb::handle in, nb::handle out,
                                            nb::handle reduction, int32_t root,
                                            nb::handle algorithm) {
        const auto target = arrays_.locate(out, true);
        if (!target) return std::nullopt;
        const auto source = in.is(out) ? target : arrays_.locate(in, false);
        if (!source) return std::nullopt;
        const CallKey key = key_of(op, *source, *target, reduction, root, algorithm);
        const auto found = known_.find(key);
        if (found == known_.end() || !safe(key, source->address, target->address))
            return std::nullopt;
        return Found{found->second.call.get(), algorithm.is_none(), source->address,
                     target->address, target->bytes};
    }

    // Adds the call to a pack (small arrays that are sent as one message). Returns false if no pack
    // takes it. The arrays of a known call were neither copied nor converted, so they can be packed
    // from where they are.
    [[nodiscard]] bool record(const Found& found, nb::handle out) const {
        const CallArgs& args = found.call->args;
        if (args.op != OpKind::all_reduce || !found.plain) return false;
        for (const Kind& kind : recording_->kinds) {
            if (kind.dtype != args.dtype || kind.reduction != args.reduction ||
                found.bytes > kind.most_bytes)
                continue;
            kind.pack->add(found.target, found.bytes, nb::borrow(out));
            return true;
        }
        return false;
    }

    // Returns true if the result does not overwrite input that is still needed. Otherwise Python
    // makes a copy.
    [[nodiscard]] bool safe(const CallKey& key, uintptr_t in, uintptr_t out) const noexcept {
        return overlap_is_safe(static_cast<OpKind>(key.op), group_->members().rank(),
                               {in, key.in_bytes}, {out, key.out_bytes});
    }

    std::shared_ptr<Group> group_;
    nb::callable make_work_;
    nb::set held_;
    nb::callable prune_;
    double inline_s_;
    Arrays arrays_;
    std::optional<Recording> recording_;
    std::unordered_map<CallKey, Known, CallKeyHash> known_;
};

}  // namespace

void register_fast_path(nb::module_& m) {
    nb::class_<FastPath>(m, "FastPath")
        .def(nb::init<std::shared_ptr<Group>, nb::callable, nb::set, nb::callable, double>(),
             "group"_a, "make_work"_a, "held"_a, "prune"_a, "inline_s"_a)
        .def_rw("timeout_s", &FastPath::timeout_s)
        .def(
            "learn",
            [](FastPath& self, uint32_t op, const nb::tuple& in, const nb::tuple& out,
               nb::object reduction, int32_t root, nb::object algorithm,
               std::shared_ptr<Prepared> call) {
                const CallKey key =
                    key_of(op, located(in), located(out), reduction, root, algorithm);
                self.learn(key, {std::move(call), std::move(reduction), std::move(algorithm)});
            },
            "op"_a, "in_"_a, "out"_a, "reduction"_a, "root"_a, "algorithm"_a.none(), "call"_a)
        .def("start_recording", &FastPath::start_recording)
        .def("stop_recording", &FastPath::stop_recording)
        .def("pack_into", &FastPath::pack_into, "dtype"_a, "reduction"_a, "most_bytes"_a, "pack"_a)
        .def("run", &FastPath::run, "op"_a, "in_"_a.none(), "out"_a.none(), "reduction"_a.none(),
             "root"_a.none(), "algorithm"_a.none(), "async_op"_a.none());
}

}  // namespace unisono::bind
