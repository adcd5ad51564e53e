// The failures that peers report with their last frames.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "core/control_words.h"
#include "transport/transport.h"

namespace unisono {

class FaultReports {
  public:
    // Returns the target for the text of a frame of kind `failed`, or nullptr if the text is too
    // long.
    std::byte* place(uint32_t peer, const Frame& frame) {
        if (frame.bytes > kFaultText) return nullptr;
        return reinterpret_cast<std::byte*>(texts_[peer].data());
    }
    // Returns the reported failure. Requires that the text has arrived.
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
