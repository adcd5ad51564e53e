// Bindings of the group and its calls. Every call that may block releases the GIL.
#include "execution/group.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <tuple>
#include <utility>

#include "bind/buffer.h"
#include "bind/connections.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/message_libraries.h"
#include "bind/nonce.h"
#include "bind/register.h"
#include "bind/voted_calls.h"
#include "core/call_fingerprint.h"
#include "execution/prepared_call.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {
namespace {

std::span<const std::byte> bytes_of(const nb::bytes& bytes) {
    return {reinterpret_cast<const std::byte*>(bytes.c_str()), bytes.size()};
}

Pieces pieces_of(const Memory& memory) {
    Pieces pieces;
    for (const auto& [address, bytes] : memory) pieces.push_back({at(address), bytes});
    return pieces;
}

// What one call adds to the rank's counters: the row, the number of calls, the bytes sent, and the
// bytes received; see unisono.communicator.call_volume.
using VolumeTuple = std::tuple<uint32_t, uint32_t, uint64_t, uint64_t>;

CallVolume volume_of(const VolumeTuple& volume) {
    const auto& [row, calls, bytes_sent, bytes_received] = volume;
    if (row >= kCounterRows)
        throw Error(Fault::invalid, "expected the number of a row of the counters, below " +
                                        std::to_string(kCounterRows) + ", got " +
                                        std::to_string(row));
    return {row, calls, bytes_sent, bytes_received};
}

// The form of a call for shared heaps: plan, `extra`, block bytes, and whether peers read the input
// and the output.
using HeapFormTuple = std::tuple<std::shared_ptr<Plan>, uint64_t, uint64_t, bool, bool>;

std::shared_ptr<const HeapForm> heap_form_of(const std::optional<HeapFormTuple>& form,
                                             CallArgs args) {
    if (!form) return nullptr;
    const auto& [plan, extra, block_bytes, in, out] = *form;
    args.extra = extra;
    return std::make_shared<HeapForm>(HeapForm{plan, fingerprint(args), block_bytes, in, out});
}

[[noreturn]] void raise_no_room(size_t bytes, Group& group) {
    PyErr_Format(PyExc_MemoryError,
                 "no room for a shared array of %zu bytes: %llu of %llu bytes are in use", bytes,
                 static_cast<unsigned long long>(group.heap().used_bytes()),
                 static_cast<unsigned long long>(group.segment().shape().heap_bytes));
    throw nb::python_error();
}

Execution bound(Group& group, const Prepared& call, const Memory& in, const Memory& out) {
    return group.dispatcher().or_fail([&] { return call.bind(pieces_of(in), pieces_of(out)); });
}

// Makes a continuation (a function that returns the call to run directly after another call) from
// the Python function `then`, which returns that call as (call, in, out). If the ranks disagree,
// `then` fails the group and raises. The thread that drives the calls runs it.
Continuation continuation_of(Group& group, nb::object then) {
    if (then.is_none()) return {};
    const std::shared_ptr<PyObject> held(then.release().ptr(), [](PyObject* object) {
        const WithGil gil;
        Py_DECREF(object);
    });
    return [&group, held]() -> std::optional<Execution> {
        const WithGil gil;
        try {
            const auto next = nb::cast<nb::tuple>(nb::handle(held.get())());
            return nb::cast<const Prepared&>(next[0]).bind(pieces_of(nb::cast<Memory>(next[1])),
                                                           pieces_of(nb::cast<Memory>(next[2])));
        } catch (const nb::python_error&) {
            group.members().require_healthy();
            throw;
        }
    };
}

void bind_plan(nb::module_& m) {
    nb::class_<Plan>(m, "Plan").def(
        "__init__",
        [](Plan* self, const nb::bytes& packed, const nb::bytes& readers, uint32_t rank,
           uint32_t ranks, uint32_t pieces_in, uint32_t pieces_out, uint32_t parts, uint32_t stages,
           uint32_t rounds, std::vector<uint32_t> slots, uint32_t scratch, bool addresses_only) {
            new (self) Plan(bytes_of(packed), bytes_of(readers), rank, ranks, pieces_in, pieces_out,
                            parts, stages, rounds, std::move(slots), scratch, addresses_only);
        },
        "packed"_a, "readers"_a, "rank"_a, "ranks"_a, "pieces_in"_a, "pieces_out"_a, "parts"_a,
        "stages"_a, "rounds"_a, "slots"_a, "scratch"_a, "addresses_only"_a = false);
    nb::class_<Prepared>(m, "Prepared")
        .def(
            "__init__",
            [](Prepared* self, std::shared_ptr<Plan> plan, uint32_t op, uint32_t dtype,
               uint32_t reduction, int32_t root, uint64_t count, uint64_t extra,
               uint64_t block_bytes, uint64_t piece_bytes, uint64_t longest_bytes, uint32_t policy,
               std::optional<uint32_t> caller_dtype, uint32_t lead, uint32_t lengths_from,
               const VolumeTuple& volume, const std::optional<HeapFormTuple>& heap_form) {
                if (op >= kOpKinds || dtype >= num_dtypes || reduction >= num_reduce_ops ||
                    policy > static_cast<uint32_t>(StorePolicy::adaptive) ||
                    caller_dtype.value_or(0) >= num_dtypes || lengths_from >= kLengthsFrom) {
                    throw Error(
                        Fault::invalid,
                        "expected valid numbers of an operation, two types, a reduction, a store "
                        "policy and a source of lengths, got " +
                            std::to_string(op) + ", " + std::to_string(dtype) + " and " +
                            std::to_string(caller_dtype.value_or(dtype)) + ", " +
                            std::to_string(reduction) + ", " + std::to_string(policy) + ", " +
                            std::to_string(lengths_from));
                }
                CallArgs args{static_cast<OpKind>(op),
                              static_cast<DType>(dtype),
                              static_cast<ReduceOp>(reduction),
                              root,
                              count,
                              extra};
                if (caller_dtype) args.caller_dtype = static_cast<DType>(*caller_dtype);
                args.lengths_from = static_cast<LengthsFrom>(lengths_from);
                if (block_bytes == 0 || block_bytes % size_of(args.dtype) != 0) {
                    throw Error(Fault::invalid, "block_bytes: expected a positive multiple of " +
                                                    std::to_string(size_of(args.dtype)) + ", got " +
                                                    std::to_string(block_bytes));
                }
                new (self) Prepared{std::move(plan),
                                    args,
                                    fingerprint(args),
                                    block_bytes,
                                    piece_bytes,
                                    longest_bytes,
                                    static_cast<StorePolicy>(policy),
                                    lead,
                                    volume_of(volume),
                                    heap_form_of(heap_form, args)};
            },
            "plan"_a, "op"_a, "dtype"_a, "reduction"_a, "root"_a, "count"_a, "extra"_a,
            "block_bytes"_a, "piece_bytes"_a, "longest_bytes"_a, "policy"_a,
            "caller_dtype"_a = nb::none(), "lead"_a = 0, "lengths_from"_a = 0,
            "volume"_a = VolumeTuple{}, "heap_form"_a = nb::none())
        .def_prop_ro("volume",
                     [](const Prepared& self) {
                         const CallVolume& v = self.volume;
                         return VolumeTuple{v.row, v.calls, v.bytes_sent, v.bytes_received};
                     })
        .def(
            "with_volume",
            [](const Prepared& self, const VolumeTuple& volume) {
                auto changed = std::make_shared<Prepared>(self);
                changed->volume = volume_of(volume);
                return changed;
            },
            "volume"_a);
}

void bind_under_way(nb::module_& m) {
    nb::class_<Job>(m, "Job")
        .def("done", &Job::done)
        .def("error", [](const Job& job) -> nb::object {
            if (!job.done() || !job.error()) return nb::none();
            return nb::make_tuple(static_cast<uint32_t>(job.error()->fault()),
                                  text_of(*job.error()));
        });
}

void bind_calls(nb::class_<Group>& group) {
    group
        .def(
            "run_pieces",
            [](Group& self, const Prepared& call, const Memory& in, const Memory& out,
               double timeout_s, nb::object then) {
                Execution execution = bound(self, call, in, out);
                Continuation continuation = continuation_of(self, std::move(then));
                const WithoutGil release;
                self.dispatcher().run(std::move(execution), timeout_s, python_signals(),
                                      std::move(continuation));
            },
            "call"_a, "in_"_a, "out"_a, "timeout_s"_a, "then"_a = nb::none())
        .def(
            "submit_pieces",
            [](Group& self, const Prepared& call, const Memory& in, const Memory& out,
               double timeout_s, double inline_s, nb::object then) {
                Execution execution = bound(self, call, in, out);
                Continuation continuation = continuation_of(self, std::move(then));
                const WithoutGil release;
                return self.dispatcher().submit(std::move(execution), timeout_s, inline_s,
                                                std::move(continuation));
            },
            "call"_a, "in_"_a, "out"_a, "timeout_s"_a, "inline_s"_a, "then"_a = nb::none())
        .def(
            "submit_voted",
            [](Group& self, const Prepared& vote, Address votes, const Prepared* call,
               const Memory& in, const Memory& out, double timeout_s, double inline_s) {
                const Memory own_vote{{votes, sizeof(int64_t)}};
                Execution first = bound(self, vote, own_vote, own_vote);
                std::optional<Execution> next;
                if (call) next = bound(self, *call, in, out);
                Continuation continuation = continuation_of_vote(
                    reinterpret_cast<const int64_t*>(at(votes)), std::move(next));
                const WithoutGil release;
                return self.dispatcher().submit(std::move(first), timeout_s, inline_s,
                                                std::move(continuation));
            },
            "vote"_a, "votes"_a, "call"_a.none(), "in_"_a, "out"_a, "timeout_s"_a, "inline_s"_a)
        .def(
            "wait",
            [](Group& self, Job& job, double timeout_s) {
                const WithoutGil release;
                return self.dispatcher().wait(job, timeout_s, python_signals());
            },
            "job"_a, "timeout_s"_a);
}

}  // namespace

void register_group(nb::module_& m) {
    m.def(
        "segment_shape",
        [](uint32_t ranks, uint32_t cores, uint64_t staging_bytes) {
            const SegmentShape shape = shape_for(ranks, cores, staging_bytes);
            return std::make_pair(shape.depth, shape.buffer_bytes);
        },
        "ranks"_a, "cores"_a, "staging_bytes"_a);
    m.def(
        "create_segment",
        [](uint32_t ranks, uint32_t depth, uint64_t buffer_bytes, const nb::bytes& nonce,
           std::optional<int> file, bool heaps) {
            SegmentShape shape = shape_for(ranks, ranks, 0);
            if (!heaps) shape.heap_bytes = 0;
            shape.depth = depth;
            shape.buffer_bytes = buffer_bytes;
            if (!file) return create_segment(shape, nonce_of(nonce)).release();
            lay_out_segment(*file, shape, nonce_of(nonce));
            return *file;
        },
        "ranks"_a, "depth"_a, "buffer_bytes"_a, "nonce"_a, "file"_a = nb::none(), "heaps"_a = true);
    bind_plan(m);
    bind_under_way(m);
    nb::class_<Group> group(m, "Group");
    group
        .def(
            "__init__",
            [](Group* self, int fd, uint32_t rank, const nb::bytes& nonce, uint32_t cores) {
                new (self) Group(Descriptor(fd), rank, nonce_of(nonce), cores);
            },
            "fd"_a, "rank"_a, "nonce"_a, "cores"_a)
        .def_prop_ro("ranks", [](Group& self) { return self.members().ranks(); })
        .def_prop_ro("depth", [](Group& self) { return self.segment().shape().depth; })
        .def_prop_ro("buffer_bytes",
                     [](Group& self) { return self.segment().shape().buffer_bytes; })
        .def_prop_ro("heap_bytes", [](Group& self) { return self.segment().shape().heap_bytes; })
        .def_prop_ro("used_heap_bytes", [](Group& self) { return self.heap().used_bytes(); })
        .def(
            "allocate",
            [](Group& self, size_t bytes) {
                self.members().require_healthy();
                std::shared_ptr<std::byte> memory = self.heap().allocate(bytes);
                if (!memory) raise_no_room(bytes, self);
                void* const data = memory.get();
                auto owner = std::make_unique<std::shared_ptr<std::byte>>(std::move(memory));
                const nb::capsule held(owner.get(), [](void* kept) noexcept {
                    delete static_cast<std::shared_ptr<std::byte>*>(kept);
                });
                static_cast<void>(owner.release());
                return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {bytes}, held);
            },
            "bytes"_a)
        .def_prop_ro("calls", &Group::calls)
        .def("counters",
             [](const Group& self) {
                 using Row = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>;
                 std::vector<Row> rows;
                 for (uint32_t number = 0; number < kCounterRows; ++number) {
                     const auto& row = self.counters().row(number);
                     rows.emplace_back(row.calls.load(std::memory_order_relaxed),
                                       row.bytes_sent.load(std::memory_order_relaxed),
                                       row.bytes_received.load(std::memory_order_relaxed),
                                       row.waited_ns.load(std::memory_order_relaxed));
                 }
                 return rows;
             })
        .def("can_read_peers", &Group::can_read_peers)
        .def("require_healthy", [](Group& self) { self.members().require_healthy(); })
        .def("refuse", &Group::refuse, "reason"_a, nb::call_guard<WithoutGil>())
        .def("fail_mismatch", &Group::fail_mismatch, "text"_a)
        .def("abort", &Group::abort, "reason"_a)
        .def(
            "present", [](Group& self, uint32_t peer) { return self.members().present(peer); },
            "peer"_a)
        .def(
            "exchange_successor",
            [](Group& self, uint64_t expected, uint64_t desired) {
                return self.members().exchange_successor(expected, desired);
            },
            "expected"_a, "desired"_a)
        .def(
            "close",
            [](Group& self, double timeout_s) {
                std::optional<nb::python_error> raised;  // raised by a signal handler during close
                const auto signals = [&raised] {
                    const WithGil gil;
                    if (PyErr_CheckSignals() != 0) raised.emplace();
                    return raised.has_value();
                };
                {
                    const WithoutGil free;
                    self.close(timeout_s, signals);
                }
                if (raised) throw nb::python_error(*raised);
            },
            "timeout_s"_a = 2.0)
        .def("give_back", &Group::give_back, nb::call_guard<WithoutGil>());
    bind_calls(group);
    bind_hosts(group);
}

}  // namespace unisono::bind
