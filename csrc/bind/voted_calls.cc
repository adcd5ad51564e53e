// All_reduces that run only if every rank is ready for them. Each can be begun many times, with
// different arrays.
#include "bind/voted_calls.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/arrays.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/pack.h"
#include "bind/register.h"
#include "execution/group.h"
#include "execution/prepared_call.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {
namespace {

std::string text_of(const nb::bytes& bytes) {
    return {bytes.c_str(), bytes.size()};
}

Pieces one_piece(std::byte* data, uint64_t bytes) {
    Pieces pieces;
    pieces.push_back({data, bytes});
    return pieces;
}

constexpr size_t kSmall = 2048;  // bytes

// The memory of one call. Several arrays are copied into one buffer, and copied back at the end.
struct Carried {
    Pack pack;
    std::shared_ptr<std::vector<std::byte>> buffer;  // null for one array

    // Returns true if the copies between arrays and buffer take less time than a lock.
    [[nodiscard]] bool is_small() const noexcept { return !buffer || buffer->size() <= kSmall; }
    [[nodiscard]] Address buffer_address() const noexcept {
        return reinterpret_cast<Address>(buffer->data());
    }
    [[nodiscard]] Pieces pieces() const {
        if (buffer) return one_piece(buffer->data(), buffer->size());
        const auto& [address, bytes] = pack.memory().front();
        return one_piece(at(address), bytes);
    }
};

// A vote that travels with the data, as one more element after the data. The reduction of
// agreements is an agreement. An objection of any rank changes it.
struct CarriedVote {
    std::string agreement, objection;  // the bytes of one element
    CallVolume volume;                 // added to the counters if all ranks agree
};

// The handle of one call. Until the call has ended, `held` keeps this object and its memory alive.
class VotedWork {
  public:
    VotedWork(std::shared_ptr<Group> group, Carried carried, nb::set held)
        : group_(std::move(group)), carried_(std::move(carried)), held_(std::move(held)) {}

    void submit(const Prepared& vote, const Prepared& call, double timeout_s, double inline_s) {
        Dispatcher& dispatcher = group_->dispatcher();
        const Pieces own_vote = one_piece(reinterpret_cast<std::byte*>(&vote_), sizeof vote_);
        Execution first = dispatcher.or_fail([&] { return vote.bind(own_vote, own_vote); });
        Execution next =
            dispatcher.or_fail([&] { return call.bind(carried_.pieces(), carried_.pieces()); });
        const WithoutGil release;
        if (carried_.buffer) carried_.pack.gather(carried_.buffer_address());
        job_ = dispatcher.submit(std::move(first), timeout_s, inline_s,
                                 continuation_of_vote(&vote_, std::move(next), &agreed_ns_));
    }

    // Begins a call whose last element is the vote.
    void submit_carrying(const std::shared_ptr<const CarriedVote>& vote, bool agrees,
                         const Prepared& call, double timeout_s, double inline_s) {
        Dispatcher& dispatcher = group_->dispatcher();
        Execution execution =
            dispatcher.or_fail([&] { return call.bind(carried_.pieces(), carried_.pieces()); });
        const std::string& own = agrees ? vote->agreement : vote->objection;
        std::byte* const last = carried_.buffer->data() + carried_.buffer->size() - own.size();
        const WithoutGil release;
        carried_.pack.gather(carried_.buffer_address());
        std::memcpy(last, own.data(), own.size());
        const auto count = [this, vote, last]() -> std::optional<Execution> {
            vote_ = std::memcmp(last, vote->agreement.data(), vote->agreement.size()) == 0;
            if (ran()) group_->counters().add(vote->volume);
            return std::nullopt;
        };
        job_ = dispatcher.submit(std::move(execution), timeout_s, inline_s, count);
    }

    void wait(nb::handle self, std::optional<double> timeout_s) {
        const double limit_s = timeout_s ? std::max(*timeout_s, 0.0) : -1;
        bool in_time = true;
        if (job_->done() && carried_.is_small()) {          // not worth a release of the GIL
            group_->dispatcher().wait(*job_, limit_s, {});  // throws the error of the call
            complete();
        } else {
            const WithoutGil release;
            in_time = group_->dispatcher().wait(*job_, limit_s, python_signals());
            if (in_time) complete();
        }
        if (!in_time) {
            const std::string text =
                "the call is still under way after " + std::to_string(*timeout_s) + " s (timeout)";
            PyErr_SetString(PyExc_TimeoutError, text.c_str());
            throw nb::python_error();
        }
        if (PySet_Discard(held_.ptr(), self.ptr()) < 0) PyErr_Clear();
    }

    [[nodiscard]] bool done() const noexcept { return job_->done(); }
    [[nodiscard]] bool ran() const noexcept { return vote_ != 0; }
    [[nodiscard]] std::optional<std::pair<int64_t, int64_t>> times_ns() const noexcept {
        if (!job_->done() || !ran() || agreed_ns_ == 0) return std::nullopt;
        return std::make_pair(agreed_ns_, job_->ended_ns());
    }

  private:
    // Copies the result to the arrays. Only the first thread that waits does so.
    void complete() {
        if (!carried_.buffer) return;
        const std::lock_guard lock(completing_);
        if (!std::exchange(completed_, true) && ran())
            carried_.pack.scatter(carried_.buffer_address());
    }

    std::shared_ptr<Group> group_;
    Carried carried_;
    nb::set held_;
    int64_t vote_ = 1;
    int64_t agreed_ns_ = 0;
    std::shared_ptr<Job> job_;
    std::mutex completing_;
    bool completed_ = false;
};

class VotedAllReduce {
  public:
    // Votes by the call `vote` before the all_reduce `call`, which moves `lengths` bytes.
    VotedAllReduce(std::shared_ptr<Group> group, std::shared_ptr<Prepared> vote,
                   std::shared_ptr<Prepared> call, const std::vector<uint64_t>& lengths,
                   nb::set held, nb::callable prune, double inline_s)
        : group_(std::move(group)),
          vote_(std::move(vote)),
          call_(std::move(call)),
          lengths_(lengths),
          held_(std::move(held)),
          prune_(std::move(prune)),
          inline_s_(inline_s) {
        if (lengths_.size() < 2) return;
        uint64_t bytes = 0;
        for (const uint64_t length : lengths_) bytes += length;
        buffer_ = std::make_shared<std::vector<std::byte>>(bytes);
    }

    // Votes by the last element of the all_reduce `call`, which moves one element more than the
    // `lengths`. `volume` is added to the counters if the call has run.
    VotedAllReduce(std::shared_ptr<Group> group, std::shared_ptr<Prepared> call,
                   const std::vector<uint64_t>& lengths, CarriedVote carried_vote, nb::set held,
                   nb::callable prune, double inline_s)
        : group_(std::move(group)),
          call_(std::move(call)),
          carried_vote_(std::make_shared<const CarriedVote>(std::move(carried_vote))),
          lengths_(lengths),
          held_(std::move(held)),
          prune_(std::move(prune)),
          inline_s_(inline_s) {
        uint64_t bytes = carried_vote_->agreement.size();
        for (const uint64_t length : lengths_) bytes += length;
        buffer_ = std::make_shared<std::vector<std::byte>>(bytes);
    }

    // Begins the vote, which tells if all ranks are ready, and the all_reduce. Returns None if an
    // array must be copied first. Requires that the work of the previous begin() has ended.
    nb::object begin(const nb::tuple& arrays, double timeout_s) {
        if (arrays.size() != lengths_.size()) return nb::none();
        Carried carried{{}, buffer_};
        for (size_t i = 0; i < lengths_.size(); ++i) {
            const auto located = arrays_.locate(arrays[i], true);
            if (!located || located->bytes != lengths_[i] ||
                located->dtype != call_->args.caller_dtype.value_or(call_->args.dtype))
                return nb::none();
            carried.pack.add(located->address, located->bytes, arrays[i]);
        }
        return begun(std::move(carried), true, timeout_s);
    }

    // Begins a call that runs on no rank, because this rank is not ready. Requires a carried vote,
    // and that the work of the previous begin() has ended.
    nb::object begin_void(double timeout_s) {
        if (!carried_vote_) throw nb::value_error("this vote does not travel with the data");
        std::fill(buffer_->begin(), buffer_->end(), std::byte{0});
        return begun({{}, buffer_}, false, timeout_s);
    }

  private:
    nb::object begun(Carried carried, bool agrees, double timeout_s) {
        nb::object made = nb::cast(new VotedWork(group_, std::move(carried), held_),
                                   nb::rv_policy::take_ownership);
        auto* work = nb::inst_ptr<VotedWork>(made);
        if (carried_vote_) {
            work->submit_carrying(carried_vote_, agrees, *call_, timeout_s, inline_s_);
        } else {
            work->submit(*vote_, *call_, timeout_s, inline_s_);
        }
        if (!work->done()) {
            keep_in(held_, made);
            prune_();
        }
        return made;
    }

    std::shared_ptr<Group> group_;
    std::shared_ptr<Prepared> vote_, call_;
    std::shared_ptr<const CarriedVote> carried_vote_;  // null if `vote_` precedes the data
    std::vector<uint64_t> lengths_;
    nb::set held_;
    nb::callable prune_;
    double inline_s_;
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
    nb::class_<VotedAllReduce>(m, "VotedAllReduce")
        .def(nb::init<std::shared_ptr<Group>, std::shared_ptr<Prepared>, std::shared_ptr<Prepared>,
                      const std::vector<uint64_t>&, nb::set, nb::callable, double>(),
             "group"_a, "vote"_a, "call"_a, "lengths"_a, "held"_a, "prune"_a, "inline_s"_a)
        .def(
            "__init__",
            [](VotedAllReduce* self, std::shared_ptr<Group> group, std::shared_ptr<Prepared> call,
               const std::vector<uint64_t>& lengths, const nb::bytes& agreement,
               const nb::bytes& objection, const Prepared& counted, nb::set held,
               nb::callable prune, double inline_s) {
                CarriedVote vote{text_of(agreement), text_of(objection), counted.volume};
                new (self)
                    VotedAllReduce(std::move(group), std::move(call), lengths, std::move(vote),
                                   std::move(held), std::move(prune), inline_s);
            },
            "group"_a, "call"_a, "lengths"_a, "agreement"_a, "objection"_a, "counted"_a, "held"_a,
            "prune"_a, "inline_s"_a)
        .def("begin", &VotedAllReduce::begin, "arrays"_a, "timeout_s"_a)
        .def("begin_void", &VotedAllReduce::begin_void, "timeout_s"_a);
}

}  // namespace unisono::bind
