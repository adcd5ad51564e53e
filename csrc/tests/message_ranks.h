// Point-to-point messages between test ranks, with their expected content.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <random>
#include <utility>
#include <vector>

#include "tests/world.h"

namespace unisono::test {

using Data = std::vector<uint8_t>;
using Requests = std::deque<p2p::Request>;  // a deque, because requests must not move

inline uint64_t seed_of(uint32_t from, uint32_t to, uint64_t tag, uint64_t number) {
    return ((from * 8ULL + to) * 8 + tag) * 64 + number;
}

inline Data data_of(uint64_t seed, size_t bytes) {
    Data data(bytes);
    for (size_t i = 0; i < data.size(); ++i)
        data[i] = static_cast<uint8_t>(seed * 13 + i + i / 251);
    return data;
}

inline p2p::Request& begin(Requests& requests, Rank& rank, const p2p::Message& message, bool sends,
                           bool in_background = false) {
    p2p::Request& request = requests.emplace_back(message, sends);
    rank.p2p->begin(request, in_background);
    return request;
}

inline void send(Rank& rank, Data& data, int32_t to, uint64_t tag, double timeout_s = kLong_s) {
    p2p::Request request(message(data, to, tag), true);
    rank.p2p->begin(request, false);
    rank.p2p->wait(request, timeout_s, -1, {});
}

// Receives a message and returns its source rank.
inline int32_t receive(Rank& rank, Data& data, int32_t from, uint64_t tag,
                       double timeout_s = kLong_s) {
    p2p::Request request(message(data, from, tag), false);
    rank.p2p->begin(request, false);
    rank.p2p->wait(request, timeout_s, -1, {});
    return request.source();
}

// Sends `count` messages to every other rank, and receives `count` messages from each of them. The
// receives are not in the order of the sends. Adds to `wrong` the number of messages with wrong
// content. `bytes_of(seed)` is the length of a message.
template <class BytesOf>
void exchange(Rank& rank, uint32_t ranks, uint64_t tag, uint64_t count, BytesOf bytes_of,
              std::atomic<int>& wrong) {
    const auto made = [&](uint32_t from, uint32_t to, uint64_t number) {
        const uint64_t seed = seed_of(from, to, tag, number);
        return data_of(seed, bytes_of(seed));
    };
    std::mt19937_64 random(rank.rank * 10 + tag);
    std::vector<std::pair<Data, Data>> arriving;  // received data and expected data
    std::vector<Data> leaving;
    arriving.reserve(ranks * count);
    leaving.reserve(ranks * count);
    Requests requests;
    for (uint64_t k = 0; k < count; ++k) {
        const bool in_background = random() % 2;
        for (uint32_t i = 1; i < ranks; ++i) {
            const uint32_t to = (rank.rank + i) % ranks, from = (rank.rank + ranks - i) % ranks;
            leaving.push_back(made(rank.rank, to, k));
            begin(requests, rank, message(leaving.back(), static_cast<int32_t>(to), tag), true,
                  in_background);
            auto expected = made(from, rank.rank, k);
            arriving.emplace_back(Data(expected.size()), expected);
            begin(requests, rank, message(arriving.back().first, static_cast<int32_t>(from), tag),
                  false, in_background);
        }
    }
    std::vector<p2p::Request*> order;
    for (p2p::Request& request : requests) order.push_back(&request);
    std::shuffle(order.begin(), order.end(), random);
    for (p2p::Request* const request : order) {
        while (!rank.p2p->wait(*request, kLong_s, random() % 2 ? -1 : 0.001, {})) {
        }
    }
    for (const auto& [got, expected] : arriving) wrong += got != expected;
    for (const p2p::Request& request : requests) wrong += !request.done() || request.error();
}

}  // namespace unisono::test
