// What is fed with bytes: by libFuzzer, which makes them up, and by the replay of those it kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace unisono::fuzz {

// Whatever a proved peer may send, through the code that receives it. Aborts if a rank is left in a
// state that it must never be in.
void feed_frames(const uint8_t* data, size_t size);
// Whatever a peer may send through a library that carries whole messages, and what that may do.
void feed_messages(const uint8_t* data, size_t size);
// Plans, which are run if they are not refused.
void feed_plans(const uint8_t* data, size_t size);

// Takes values from the front of some bytes; zeros when there are no more.
class Bytes {
  public:
    Bytes(const uint8_t* data, size_t size) : data_(data), left_(size) {}
    [[nodiscard]] size_t left() const noexcept { return left_; }
    template <class T>
    T take() noexcept {
        T value{};
        copy(&value, sizeof(value));
        return value;
    }
    void copy(void* to, size_t bytes) noexcept {
        const size_t some = bytes < left_ ? bytes : left_;
        if (some) std::memcpy(to, data_, some);
        data_ += some;
        left_ -= some;
    }

  private:
    const uint8_t* data_;
    size_t left_;
};

}  // namespace unisono::fuzz
