// Copies and reductions of records.
#include <algorithm>
#include <array>
#include <utility>

#include "execution/executor.h"

namespace unisono {
namespace {

// Bytes read at once from all operands: less than a core's private cache.
constexpr uint64_t kFetchedBytes = 256 << 10;
// Minimum bytes of each operand, because each read is a system call.
constexpr uint64_t kLeastFetchedBytes = 16 << 10;
// Bytes reduced before they are written back: they are then still in the core's first cache.
constexpr uint64_t kWrittenBackBytes = 16 << 10;

}  // namespace

std::byte* Executor::resolve(const Execution& call, const Ref& ref) const noexcept {
    switch (ref.space) {
        case Space::slot:
            return const_cast<std::byte*>(slot_of(call, ref));
        case Space::tmp: {  // each block in flight has its own scratch
            const uint64_t at = ref.index * (call.lead + 1) + call.block % (call.lead + 1);
            return const_cast<std::byte*>(scratch_.data()) + at * call.block_bytes;
        }
        case Space::shared:  // an address in the memory of `rank`
            return reinterpret_cast<std::byte*>(read_location(slot_of(call, ref)));
        case Space::in:
        case Space::out:
            break;
    }
    const Piece& piece = ref.space == Space::in ? call.in[ref.index] : call.out[ref.index];
    const uint64_t part = part_bytes(piece.bytes, call.plan->parts, size_of(call.args.dtype));
    return piece.data + ref.part * part + call.block * call.block_bytes;
}

const std::byte* Executor::slot_of(const Execution& call, const Ref& ref) const noexcept {
    return call.staging->buffer(ref.rank, call.ahead()) + ref.index * call.slot_bytes;
}

// Returns this rank's view of an array in a peer's heap, `at` bytes after the start of the block.
std::byte* Executor::in_heap(const Execution& call, const Ref& ref, uint64_t at, uint64_t bytes) {
    return heap_.at(ref.rank, read_location(slot_of(call, ref)) + at, bytes);
}

// Returns the memory of an operand, `at` bytes after the start of the block. Only the kernel can
// read it if it is foreign.
const std::byte* Executor::source(const Execution& call, const Ref& ref, uint64_t at,
                                  uint64_t bytes) {
    if (ref.space == Space::shared && call.args.in_heaps) return in_heap(call, ref, at, bytes);
    return resolve(call, ref) + at;
}

// Returns the bytes of this block in the part that `ref` names.
uint64_t Executor::length_of(const Execution& call, const Ref& ref) const noexcept {
    const Piece& piece = ref.space == Space::in ? call.in[ref.index] : call.out[ref.index];
    const uint64_t part = part_bytes(piece.bytes, call.plan->parts, size_of(call.args.dtype));
    const uint64_t begin = ref.part * part + call.block * call.block_bytes;
    const uint64_t end = std::min({(ref.part + 1) * part, piece.bytes, begin + call.block_bytes});
    return begin < end ? end - begin : 0;
}

void Executor::copy(const Execution& call, const Record& r) {
    const uint64_t bytes = length_of(call, r.length);
    if (bytes == 0) return;
    std::byte* dst = resolve(call, r.dst);
    const std::byte* src = source(call, r.src, 0, bytes);
    if (is_foreign(call, r.src)) {
        cross_memory_.read(r.src.rank, dst, src, bytes);
        if (r.flags & kHasSecond)
            kernels::copy(resolve(call, r.dst2), dst, bytes, store_for(call, r.dst2));
    } else if (r.flags & kHasSecond) {
        kernels::copy2(dst, resolve(call, r.dst2), src, bytes, store_for(call, r.dst),
                       store_for(call, r.dst2));
    } else if (dst != src) {
        kernels::copy(dst, src, bytes, store_for(call, r.dst));
    }
    if (r.flags & kShares) share(call, r.dst2, r.dst);
}

void Executor::share(const Execution& call, const Ref& slot, const Ref& memory) const noexcept {
    const std::byte* const own = resolve(call, memory);
    write_location(resolve(call, slot),
                   call.args.in_heaps ? heap_.offset_of(own) : reinterpret_cast<uintptr_t>(own));
}

// Operands that the kernel copies from other processes are read in portions that fit in the cache.
void Executor::reduce(const Execution& call, const Record* r) {
    const uint64_t bytes = length_of(call, r->length), element = size_of(call.args.dtype);
    const auto foreign = static_cast<uint64_t>(std::count_if(
        r + 1, r + 1 + r->sources, [&](const Record& arg) { return is_foreign(call, arg.src); }));
    uint64_t most = bytes;
    if (r->flags & kWritesBack) most = kWrittenBackBytes;
    if (foreign > 0)
        most = std::max(kFetchedBytes / foreign, kLeastFetchedBytes) / element * element;
    if (fetched_.size() < foreign * most) fetched_.resize(foreign * most);
    for (uint64_t at = 0; at < bytes; at += most)
        reduce_some(call, r, at, std::min(most, bytes - at));
    if (r->flags & kShares) share(call, r->dst2, r->dst);
}

void Executor::reduce_some(const Execution& call, const Record* r, uint64_t at, uint64_t bytes) {
    std::array<const void*, kMostSources> sources;
    std::byte* fetched = fetched_.data();
    for (size_t k = 0; k < r->sources; ++k) {
        const Ref& ref = r[k + 1].src;
        const std::byte* operand = source(call, ref, at, bytes);
        if (is_foreign(call, ref)) {
            cross_memory_.read(ref.rank, fetched, operand, bytes);
            operand = std::exchange(fetched, fetched + bytes);
        }
        sources[k] = operand;
    }
    const bool second = r->flags & kHasSecond;
    const bool average = call.args.reduction == ReduceOp::avg && (r->flags & kFinal);
    const auto operation =
        call.args.reduction == ReduceOp::avg ? ReduceOp::sum : call.args.reduction;
    kernels::reduce(call.args.dtype, operation, resolve(call, r->dst) + at,
                    second ? resolve(call, r->dst2) + at : nullptr, sources.data(), r->sources,
                    bytes / size_of(call.args.dtype), average ? members_.ranks() : 0,
                    store_for(call, r->dst),
                    second ? store_for(call, r->dst2) : kernels::Store::cached);
    if (r->flags & kWritesBack) write_back(call, r, at, bytes);
}

// Writes the result to the operands in other ranks' heaps.
void Executor::write_back(const Execution& call, const Record* r, uint64_t at, uint64_t bytes) {
    const std::byte* const result = resolve(call, r->dst) + at;
    for (size_t k = 1; k <= r->sources; ++k) {
        if (r[k].src.space == Space::shared)
            kernels::copy(in_heap(call, r[k].src, at, bytes), result, bytes);
    }
}

}  // namespace unisono
