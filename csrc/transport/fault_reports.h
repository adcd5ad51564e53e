// What peers say, with their last frame, of the failure that ended the group for them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "core/control_words.h"
#include "transport/transport.h"

namespace unisono {

class FaultNews {
  public:
    // Where the text of a frame of kind `failed` goes; nullptr if it is too long to be one.
    std::byte* place(uint32_t peer, const Frame& frame) {
        if (frame.bytes > kFaultText) return nullptr;
        return reinterpret_cast<std::byte*>(texts_[peer].data());
    }
    // The failure, once the text is there.
    [[nodiscard]] Error read(uint32_t peer, const Frame& frame) {
        const auto fault = static_cast<Fault>(frame.called.kind);
        const bool known =
            fault > Fault::none && fault <= Fault::unsupported && fault != Fault::interrupted;
        return {known ? fault : Fault::system, std::string(texts_[peer].data(), frame.bytes)};
    }

  private:
    std::map<uint32_t, std::array<char, kFaultText>> texts_;  // by peer
};

}  // namespace unisono
