// All_reduces that run only if every rank is ready for them. Each can be begun many times, with
// different arrays.
#include "bind/voted_calls.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "bind/arrays.h"
#include "bind/register.h"
#include "bind/voted_work.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {
namespace {

// How the ranks vote: by a separate call before the data, or by one more element of the data.
using Vote = std::variant<std::shared_ptr<Prepared>, std::shared_ptr<CarriedVote>>;

class VotedAllReduce {
  public:
    // `call` reduces arrays of `lengths` bytes, and one more element if it carries the vote. If
    // arrays must be copied first, begin() calls `begin_copied(self, arrays)` and returns its
    // result. `held` and `prune` are those of the communicator's pending calls.
    VotedAllReduce(std::shared_ptr<Group> group, Vote vote, std::shared_ptr<Prepared> call,
                   const std::vector<uint64_t>& lengths, nb::callable begin_copied, nb::set held,
                   nb::callable prune, double timeout_s, double inline_s)
        : group_(std::move(group)),
          vote_(std::move(vote)),
          call_(std::move(call)),
          lengths_(lengths),
          begin_copied_(std::move(begin_copied)),
          held_(std::move(held)),
          prune_(std::move(prune)),
          timeout_s_(timeout_s),
          inline_s_(inline_s) {
        uint64_t bytes = carried_vote() ? carried_vote()->agreement.size() : 0;
        if (lengths_.size() < 2 && bytes == 0) return;
        for (const uint64_t length : lengths_) bytes += length;
        buffer_ = std::make_shared<std::vector<std::byte>>(bytes);
    }

    // Begins the vote, whose result is whether all ranks are ready, and the all_reduce. Requires
    // that the program has waited for the work of the previous begin(). `self` is the Python object
    // of this object.
    nb::object begin(nb::handle self, const nb::tuple& arrays) {
        CallMemory memory{{}, buffer_};
        for (size_t i = 0; i < lengths_.size() && arrays.size() == lengths_.size(); ++i) {
            const auto located = arrays_.locate(arrays[i], true);
            if (!located || located->bytes != lengths_[i] ||
                located->dtype != call_->args.caller_dtype.value_or(call_->args.dtype))
                break;
            memory.pack.add(located->address, located->bytes, arrays[i]);
        }
        if (memory.pack.memory().size() < lengths_.size()) return begin_copied_(self, arrays);
        return begun(std::move(memory), true);
    }

    // Begins a call that runs on no rank, because this rank is not ready. Requires a carried vote,
    // and that the program has waited for the work of the previous begin().
    nb::object begin_void() {
        if (!carried_vote()) throw nb::value_error("begin_void: expected a carried vote");
        std::fill(buffer_->begin(), buffer_->end(), std::byte{0});
        return begun({{}, buffer_}, false);
    }

  private:
    [[nodiscard]] std::shared_ptr<CarriedVote> carried_vote() const {
        const auto* found = std::get_if<std::shared_ptr<CarriedVote>>(&vote_);
        return found ? *found : nullptr;
    }

    nb::object begun(CallMemory memory, bool agrees) {
        nb::object made = nb::cast(new VotedWork(group_, std::move(memory), held_),
                                   nb::rv_policy::take_ownership);
        auto* work = nb::inst_ptr<VotedWork>(made);
        if (const auto vote = carried_vote()) {
            work->submit_carrying(vote, agrees, *call_, timeout_s_, inline_s_);
        } else {
            const auto& first = std::get<std::shared_ptr<Prepared>>(vote_);
            work->submit(*first, *call_, timeout_s_, inline_s_);
        }
        if (!work->done()) {
            keep_in(held_, made);
            work->keep_storages(arrays_);
            prune_();
        }
        return made;
    }

    std::shared_ptr<Group> group_;
    Vote vote_;
    std::shared_ptr<Prepared> call_;
    std::vector<uint64_t> lengths_;
    nb::callable begin_copied_;
    nb::set held_;
    nb::callable prune_;
    double timeout_s_, inline_s_;
    Arrays arrays_;
    std::shared_ptr<std::vector<std::byte>> buffer_;
};

}  // namespace

Continuation continuation_of_vote(const int64_t* vote, std::optional<Execution> next,
                                  int64_t* agreed_ns) {
    const auto held = std::make_shared<std::optional<Execution>>(std::move(next));
    return [vote, held, agreed_ns]() -> std::optional<Execution> {
        if (agreed_ns) *agreed_ns = steady_now_ns();
        int64_t agreed = 0;
        std::memcpy(&agreed, vote, sizeof agreed);
        if (agreed == 0) return std::nullopt;
        return std::exchange(*held, std::nullopt);
    };
}

void register_voted_calls(nb::module_& m) {
    nb::class_<VotedWork>(m, "VotedWork")
        .def(
            "wait",
            [](nb::handle_t<VotedWork> self, std::optional<double> timeout_s) {
                nb::inst_ptr<VotedWork>(self)->wait(self, timeout_s);
            },
            "timeout_s"_a = nb::none())
        .def("is_completed", &VotedWork::done)
        .def("_poll", &VotedWork::done)
        .def_prop_ro("ran", &VotedWork::ran)
        .def("times_ns", &VotedWork::times_ns);
    nb::class_<CarriedVote>(m, "CarriedVote")
        .def(
            "__init__",
            [](CarriedVote* self, const nb::bytes& agreement, const nb::bytes& objection,
               const Prepared& counted) {
                new (self) CarriedVote{{agreement.c_str(), agreement.size()},
                                       {objection.c_str(), objection.size()},
                                       counted.volume};
            },
            "agreement"_a, "objection"_a, "counted"_a);
    nb::class_<VotedAllReduce>(m, "VotedAllReduce")
        .def(nb::init<std::shared_ptr<Group>, Vote, std::shared_ptr<Prepared>,
                      const std::vector<uint64_t>&, nb::callable, nb::set, nb::callable, double,
                      double>(),
             "group"_a, "vote"_a, "call"_a, "lengths"_a, "begin_copied"_a, "held"_a, "prune"_a,
             "timeout_s"_a, "inline_s"_a)
        .def(
            "begin",
            [](nb::handle_t<VotedAllReduce> self, const nb::tuple& arrays) {
                return nb::inst_ptr<VotedAllReduce>(self)->begin(self, arrays);
            },
            "arrays"_a)
        .def("begin_void", &VotedAllReduce::begin_void);
}

}  // namespace unisono::bind
