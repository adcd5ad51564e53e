// Bindings of the simulator. All inputs and outputs are arrays.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "bind/gil.h"
#include "bind/register.h"
#include "simulator/event_loop.h"
#include "simulator/message_graph.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {

namespace {

template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
std::span<const T> seen(const In<T>& array) {
    return {array.data(), array.size()};
}

// Returns a vector as a NumPy array that owns it.
template <class T>
nb::ndarray<nb::numpy, T> given(std::vector<T>&& values, size_t rows = 0) {
    auto* owned = new std::vector<T>(std::move(values));
    const nb::capsule owner(owned,
                            [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    if (rows == 0) return {owned->data(), {owned->size()}, owner};
    return {owned->data(), {rows, owned->size() / rows}, owner};
}

nb::tuple messages(const In<int32_t>& round, const In<int32_t>& src, const In<int32_t>& src_chunk,
                   const In<int32_t>& dst, const In<int32_t>& dst_chunk, const In<int32_t>& count,
                   const In<uint8_t>& reduce, const In<int32_t>& channel, const In<int32_t>& groups,
                   uint32_t ranks, uint32_t locations, bool reductions, bool gates,
                   uint32_t order) {
    const simulator::Transfers transfers{
        .round = seen(round),
        .src = seen(src),
        .src_chunk = seen(src_chunk),
        .dst = seen(dst),
        .dst_chunk = seen(dst_chunk),
        .count = seen(count),
        .channel = seen(channel),
        .reduce = seen(reduce),
    };
    const simulator::MessageOptions options{
        .ranks = ranks,
        .locations = locations,
        .reductions = reductions,
        .gates = gates,
        .order = static_cast<simulator::Order>(order),
        .groups = seen(groups),
    };
    simulator::Messages found;
    {
        const WithoutGil release;
        found = simulator::messages_of(transfers, options);
    }
    return nb::make_tuple(given(std::move(found.kind)), given(std::move(found.round)),
                          given(std::move(found.src)), given(std::move(found.dst)),
                          given(std::move(found.channel)), given(std::move(found.chunks)),
                          given(std::move(found.needs)), given(std::move(found.needs_starts)),
                          given(std::move(found.after)));
}

// An engine together with its input and output arrays.
class Simulation {
  public:
    Simulation(In<double> capacity, In<int32_t> path_values, In<int64_t> path_starts,
               In<double> weights, In<int32_t> server, In<double> busy_s, In<double> delay_s,
               In<double> tail_s, In<int32_t> path, In<double> bytes, In<int32_t> needs,
               In<int64_t> needs_starts, In<int32_t> after, uint32_t bins)
        : inputs_{nb::cast(capacity), nb::cast(path_values), nb::cast(path_starts),
                  nb::cast(weights),  nb::cast(server),      nb::cast(busy_s),
                  nb::cast(delay_s),  nb::cast(tail_s),      nb::cast(path),
                  nb::cast(bytes),    nb::cast(needs),       nb::cast(needs_starts),
                  nb::cast(after)},
          begun_s_(path.size(), -1.0),
          arrived_s_(path.size(), -1.0),
          cause_(path.size(), -1) {
        const simulator::Paths paths{
            .resources = {seen(path_values), seen(path_starts)},
            .weights = seen(weights),
            .server = seen(server),
            .busy_s = seen(busy_s),
            .delay_s = seen(delay_s),
            .tail_s = seen(tail_s),
        };
        const simulator::Tasks tasks{
            .path = seen(path),
            .bytes = seen(bytes),
            .needs = {seen(needs), seen(needs_starts)},
            .after = seen(after),
        };
        const simulator::Times times{begun_s_, arrived_s_, cause_};
        const WithoutGil release;
        engine_ = std::make_unique<simulator::Engine>(seen(capacity), paths, tasks, times, bins);
    }

    bool advance(uint64_t events) {
        const WithoutGil release;
        return engine_->advance(events);
    }

    [[nodiscard]] uint64_t to_come() const { return engine_->to_come(); }
    [[nodiscard]] double now_s() const { return engine_->now_s(); }

    // Moves the results to the caller, once, at the end: begun_s, arrived_s, cause, bytes of each
    // resource, bytes of each resource and time bin, and the width of a bin in seconds.
    nb::tuple take() {
        const simulator::Usage& usage = engine_->usage();
        auto binned = std::vector<float>(usage.binned());
        const size_t rows = usage.timed() ? usage.total().size() : 0;
        return nb::make_tuple(given(std::move(begun_s_)), given(std::move(arrived_s_)),
                              given(std::move(cause_)), given(std::vector<double>(usage.total())),
                              given(std::move(binned), rows), usage.width_s());
    }

  private:
    std::vector<nb::object> inputs_;
    std::vector<double> begun_s_, arrived_s_;
    std::vector<int32_t> cause_;
    std::unique_ptr<simulator::Engine> engine_;
};

}  // namespace

void register_simulator(nb::module_& m) {
    m.def("simulator_messages", &messages, "round"_a, "src"_a, "src_chunk"_a, "dst"_a,
          "dst_chunk"_a, "count"_a, "reduce"_a, "channel"_a, "groups"_a, nb::kw_only(), "ranks"_a,
          "locations"_a, "reductions"_a, "gates"_a, "order"_a);
    nb::class_<Simulation>(m, "Simulation")
        .def(nb::init<In<double>, In<int32_t>, In<int64_t>, In<double>, In<int32_t>, In<double>,
                      In<double>, In<double>, In<int32_t>, In<double>, In<int32_t>, In<int64_t>,
                      In<int32_t>, uint32_t>(),
             nb::kw_only(), "capacity"_a, "path_values"_a, "path_starts"_a, "weights"_a, "server"_a,
             "busy_s"_a, "delay_s"_a, "tail_s"_a, "path"_a, "bytes"_a, "needs"_a, "needs_starts"_a,
             "after"_a, "bins"_a)
        .def("advance", &Simulation::advance, "events"_a)
        .def("to_come", &Simulation::to_come)
        .def("now_s", &Simulation::now_s)
        .def("take", &Simulation::take);
}

}  // namespace unisono::bind
