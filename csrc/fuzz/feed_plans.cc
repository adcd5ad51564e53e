// A fuzz target: plans made of arbitrary bytes. Each plan is either refused, or run by the only
// rank of a group, without access to other memory.
#include <array>
#include <vector>

#include "core/call_fingerprint.h"
#include "execution/group.h"
#include "execution/prepared_call.h"
#include "fuzz/fuzz.h"

namespace unisono::fuzz {
namespace {

constexpr std::array<uint8_t, 16> kNonce{1, 2, 3};
constexpr SegmentShape kShape{1, 2, 1 << 16, 1, 64};
constexpr uint64_t kPartBytes = 128;  // bytes of every part, because all parts have equal lengths
constexpr double kTimeout_s = 1;

std::span<const std::byte> rest_of(Bytes& bytes, std::vector<std::byte>& held, size_t count) {
    held.resize(std::min(count, bytes.left()));
    bytes.copy(held.data(), held.size());
    return held;
}

// Allocates the pieces of a call, all of equal length.
Pieces pieces_of(std::vector<std::vector<std::byte>>& memory, uint32_t count, uint32_t parts) {
    Pieces pieces;
    for (uint32_t p = 0; p < count; ++p) {
        auto& piece = memory.emplace_back(parts * kPartBytes);
        pieces.push_back({piece.data(), piece.size()});
    }
    return pieces;
}

}  // namespace

void feed_plans(const uint8_t* data, size_t size) {
    Bytes bytes(data, size);
    const bool alone = bytes.take<uint8_t>() % 4 != 0;
    const uint32_t ranks = alone ? 1 : 1 + bytes.take<uint8_t>() % 4;
    const uint32_t rank = alone ? 0 : bytes.take<uint8_t>() % 4;
    const uint32_t ins = bytes.take<uint8_t>() % 4, outs = bytes.take<uint8_t>() % 4;
    const uint32_t parts = bytes.take<uint8_t>() % 5, stages = bytes.take<uint8_t>();
    const uint32_t rounds = bytes.take<uint8_t>(), scratch = bytes.take<uint8_t>() % 4;
    const uint32_t lead = bytes.take<uint8_t>() % 4, reduction = bytes.take<uint8_t>();
    std::vector<uint32_t> slots(ranks);
    for (uint32_t& count : slots) count = bytes.take<uint8_t>() % 8;
    const size_t readers = bytes.take<uint8_t>() % 4 * sizeof(Reader);
    std::vector<std::byte> records_held, readers_held;
    const auto packed_readers = rest_of(bytes, readers_held, readers);
    const auto packed = rest_of(bytes, records_held, size);
    try {
        const auto plan = std::make_shared<const Plan>(packed, packed_readers, rank, ranks, ins,
                                                       outs, parts, stages, rounds, slots, scratch);
        for (uint32_t value = 0; value <= stages; ++value)
            static_cast<void>(plan->readers_of(value).size());
        if (!alone) return;
        Group group(create_segment(kShape, kNonce), 0, kNonce, 1);
        std::vector<std::vector<std::byte>> memory;
        const CallArgs args{
            OpKind::all_reduce, DType::int32, static_cast<ReduceOp>(reduction % 10), -1, 1, 0};
        const Prepared call{plan, args,       fingerprint(args),     kPartBytes / 2,
                            0,    kPartBytes, StorePolicy::adaptive, lead};
        group.dispatcher().run(
            call.bind(pieces_of(memory, ins, parts), pieces_of(memory, outs, parts)), kTimeout_s,
            {});
    } catch (const Error&) {
    }
}

}  // namespace unisono::fuzz
