#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstring>

#include "core/error.h"

namespace unisono::bind {

inline std::array<uint8_t, 16> nonce_of(const nanobind::bytes& nonce) {
    std::array<uint8_t, 16> bytes{};
    if (nonce.size() != bytes.size())
        throw Error(Fault::invalid,
                    "expected a nonce of 16 bytes, got " + std::to_string(nonce.size()));
    std::memcpy(bytes.data(), nonce.c_str(), bytes.size());
    return bytes;
}

}  // namespace unisono::bind
