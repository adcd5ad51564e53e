#include "core/memory_hash.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace unisono {

namespace {

constexpr uint64_t kMultiplier = 0x9fb21c651e98df25ULL;  // odd, so that no bit is lost
constexpr size_t kLanes = 4;  // a multiplication takes four cycles, and one starts in each cycle
using Lanes = std::array<uint64_t, kLanes>;

uint64_t mix(uint64_t h, uint64_t word) noexcept {
    return std::rotl((h ^ word) * kMultiplier, 29);
}

void add(Lanes& lanes, const std::byte* from) noexcept {
    Lanes words;
    std::memcpy(words.data(), from, sizeof words);
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = mix(lanes[i], words[i]);
}

void add_piece(Lanes& lanes, const std::byte* piece, size_t bytes) noexcept {
    size_t done = 0;
    for (; done + sizeof(Lanes) <= bytes; done += sizeof(Lanes)) add(lanes, piece + done);
    if (done == bytes) return;
    std::array<std::byte, sizeof(Lanes)> rest{};
    std::memcpy(rest.data(), piece + done, bytes - done);
    add(lanes, rest.data());
}

}  // namespace

uint64_t hash_memory(const std::byte* memory, size_t bytes, uint64_t seed, size_t first,
                     size_t step) noexcept {
    Lanes lanes{seed, seed + 1, seed + 2, seed + 3};
    for (size_t begin = first * kHashedPiece; begin < bytes; begin += step * kHashedPiece)
        add_piece(lanes, memory + begin, std::min(kHashedPiece, bytes - begin));
    uint64_t h = mix(seed, bytes);
    for (const uint64_t lane : lanes) h = mix(h, lane);
    return h ^ h >> 32;
}

}  // namespace unisono
