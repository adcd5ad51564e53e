// Bindings of the copy and reduction kernels alone, with which the benchmark measures the least
// time of an operation. Both release the GIL.
#include <nanobind/nanobind.h>

#include <string>

#include "bind/buffer.h"
#include "bind/gil.h"
#include "bind/register.h"
#include "core/error.h"
#include "kernels/kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {
namespace {

// More parts than a benchmark has ranks on one host.
constexpr uint64_t most_parts = 64;

kernels::Store store_of(bool streaming) {
    return streaming ? kernels::Store::streaming : kernels::Store::cached;
}

void copy_memory(Address dst, Address src, uint64_t bytes, bool streaming) {
    const WithoutGil release;
    kernels::copy(at(dst), at(src), bytes, store_of(streaming));
}

// Writes the sum of `parts` consecutive parts of `count` float32 at `src` to dst.
void sum_parts(Address dst, Address src, uint64_t parts, uint64_t count, bool streaming) {
    if (parts == 0 || parts > most_parts)
        throw Error(Fault::invalid, "expected 1.." + std::to_string(most_parts) + " parts, got " +
                                        std::to_string(parts));
    const WithoutGil release;
    const void* sources[most_parts];
    for (uint64_t part = 0; part < parts; ++part)
        sources[part] = at(src + part * count * sizeof(float));
    kernels::reduce(DType::float32, ReduceOp::sum, at(dst), nullptr, sources, parts, count, 0,
                    store_of(streaming));
}

}  // namespace

void register_kernel_calls(nb::module_& m) {
    m.def("copy_memory", &copy_memory, "dst"_a, "src"_a, "bytes"_a, "streaming"_a);
    m.def("sum_parts", &sum_parts, "dst"_a, "src"_a, "parts"_a, "count"_a, "streaming"_a);
}

}  // namespace unisono::bind
