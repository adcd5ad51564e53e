// Letters that go from every rank to every other, and what they should be.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "world.h"

namespace unisono::test {

using Letter = std::vector<uint8_t>;

inline uint64_t seed_of(uint32_t from, uint32_t to, uint64_t tag, uint64_t number) {
    return ((from * 8ULL + to) * 8 + tag) * 64 + number;
}

inline Letter letter(uint64_t seed, size_t bytes) {
    Letter data(bytes);
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(seed * 13 + i);
    return data;
}

// Writes `letters` to each of the other ranks and receives as many, in another order than they
// come; counts those that are wrong. `bytes_of` tells a letter's length by its seed.
template <class BytesOf>
void exchange(Rank& rank, uint32_t ranks, uint64_t tag, uint64_t letters, BytesOf bytes_of,
              std::atomic<int>& wrong) {
    const auto write = [&](uint32_t from, uint32_t to, uint64_t number) {
        const uint64_t seed = seed_of(from, to, tag, number);
        return letter(seed, bytes_of(seed));
    };
    PostOffice& mail = *rank.mail;
    std::mt19937_64 random(rank.rank * 10 + tag);
    std::vector<std::shared_ptr<Parcel>> parcels;
    std::vector<std::pair<Letter, Letter>> arriving;  // what, and what it should be
    std::vector<Letter> leaving;
    arriving.reserve(ranks * letters);
    leaving.reserve(ranks * letters);
    for (uint64_t k = 0; k < letters; ++k) {
        for (uint32_t i = 1; i < ranks; ++i) {
            const uint32_t to = (rank.rank + i) % ranks, from = (rank.rank + ranks - i) % ranks;
            leaving.push_back(write(rank.rank, to, k));
            parcels.push_back(mail.send(message(leaving.back(), static_cast<int32_t>(to), tag)));
            auto expected = write(from, rank.rank, k);
            arriving.emplace_back(Letter(expected.size()), expected);
            parcels.push_back(
                mail.receive(message(arriving.back().first, static_cast<int32_t>(from), tag)));
        }
        if (random() % 2) mail.carry_on();
    }
    std::shuffle(parcels.begin(), parcels.end(), random);
    for (const auto& parcel : parcels) {
        while (!mail.wait(*parcel, kLong_s, random() % 2 ? -1 : 0.001, {})) {
        }
    }
    for (const auto& [got, expected] : arriving) wrong += got != expected;
    for (const auto& parcel : parcels) wrong += !parcel->done() || parcel->error();
}

}  // namespace unisono::test
