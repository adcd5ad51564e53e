// Blocking calls that look like one that Python has checked before: found by a look at the array
// and run, without going through Python again.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <functional>
#include <unordered_map>
#include <utility>

#include "buffer.h"
#include "errors.h"
#include "group.h"
#include "prepared.h"
#include "register.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {
namespace {

constexpr size_t kMostRemembered = 4096;

// What a call looks like. Reduction and algorithm are compared as objects: programs write them as
// constants, and who does not takes the slow way, which finds the same call.
struct Look {
    uint32_t op;
    uint64_t in_bytes, out_bytes;
    DType in_type, out_type;
    PyObject* reduction;
    int32_t root;
    PyObject* algorithm;
    bool operator==(const Look&) const = default;
};

struct LookHash {
    size_t operator()(const Look& k) const noexcept {
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
    nb::object reduction, algorithm;  // kept alive, so that their addresses stay theirs
};

class QuickCalls {
  public:
    explicit QuickCalls(std::shared_ptr<Group> group) : group_(std::move(group)) {}

    void learn(const Look& look, Known known) {
        if (known_.size() >= kMostRemembered) known_.clear();
        known_.insert_or_assign(look, std::move(known));
    }

    // False if no such call is known.
    bool run(const Look& look, uintptr_t in, uintptr_t out, double timeout_s) const {
        const auto found = known_.find(look);
        if (found == known_.end()) return false;
        if (!safe(look, in, out)) return false;
        const std::shared_ptr<Prepared> call = found->second.call;
        const nb::gil_scoped_release release;
        group_->dispatcher().run(
            call->bind(reinterpret_cast<std::byte*>(in), reinterpret_cast<std::byte*>(out)),
            timeout_s, python_signals());
        return true;
    }

  private:
    // Whether no result overwrites what is still to be read. Where it would, Python makes a copy.
    [[nodiscard]] bool safe(const Look& look, uintptr_t in, uintptr_t out) const noexcept {
        if (in + look.in_bytes <= out || out + look.out_bytes <= in) return true;
        const uint64_t rank = group_->members().rank();
        switch (static_cast<OpKind>(look.op)) {
            case OpKind::all_gather:
                return in == out + rank * look.in_bytes;
            case OpKind::reduce_scatter:
                return out == in + rank * look.out_bytes;
            default:
                return in == out && static_cast<OpKind>(look.op) != OpKind::all_to_all;
        }
    }

    std::shared_ptr<Group> group_;
    std::unordered_map<Look, Known, LookHash> known_;
};

Look look_of(uint32_t op, const Located& in, const Located& out, nb::handle reduction, int32_t root,
             nb::handle algorithm) {
    return {op, in.bytes, out.bytes, in.dtype, out.dtype, reduction.ptr(), root, algorithm.ptr()};
}

Located located(const nb::tuple& t) {
    return {nb::cast<uintptr_t>(t[0]), nb::cast<uint64_t>(t[1]),
            static_cast<DType>(nb::cast<uint32_t>(t[2]))};
}

}  // namespace

void register_quick(nb::module_& m) {
    nb::class_<QuickCalls>(m, "QuickCalls")
        .def(nb::init<std::shared_ptr<Group>>(), "group"_a)
        .def(
            "learn",
            [](QuickCalls& self, uint32_t op, const nb::tuple& in, const nb::tuple& out,
               nb::object reduction, int32_t root, nb::object algorithm,
               std::shared_ptr<Prepared> call) {
                const Look look =
                    look_of(op, located(in), located(out), reduction, root, algorithm);
                self.learn(look, {std::move(call), std::move(reduction), std::move(algorithm)});
            },
            "op"_a, "in_"_a, "out"_a, "reduction"_a, "root"_a, "algorithm"_a.none(), "call"_a)
        .def(
            "run",
            [](QuickCalls& self, uint32_t op, nb::handle in, nb::handle out, nb::handle reduction,
               int32_t root, nb::handle algorithm, double timeout_s) {
                const auto target = locate(out, true);
                if (!target) return false;
                const auto source = in.is(out) ? target : locate(in, false);
                if (!source) return false;
                const Look look = look_of(op, *source, *target, reduction, root, algorithm);
                return self.run(look, source->address, target->address, timeout_s);
            },
            "op"_a, "in_"_a, "out"_a.none(), "reduction"_a, "root"_a, "algorithm"_a.none(),
            "timeout_s"_a)
        .def(
            "run_at",
            [](QuickCalls& self, uint32_t op, const nb::tuple& in, const nb::tuple& out,
               nb::handle reduction, int32_t root, nb::handle algorithm, double timeout_s) {
                const Located source = located(in), target = located(out);
                const Look look = look_of(op, source, target, reduction, root, algorithm);
                return self.run(look, source.address, target.address, timeout_s);
            },
            "op"_a, "in_"_a, "out"_a, "reduction"_a, "root"_a, "algorithm"_a.none(), "timeout_s"_a);
}

}  // namespace unisono::bind
