// Memory that its owner cannot write to.
#pragma once

#include <sys/mman.h>

#include <cstddef>

#include "core/error.h"

namespace unisono::test {

// The memory of a receive. Its last pages are read-only.
class PartlyReadOnly {
  public:
    explicit PartlyReadOnly(size_t bytes) : bytes_(bytes) {
        void* const memory =
            ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw_errno("mapping memory");
        data_ = static_cast<std::byte*>(memory);
        ::mprotect(data_ + bytes - kReadOnly, kReadOnly, PROT_READ);
    }
    PartlyReadOnly(const PartlyReadOnly&) = delete;
    PartlyReadOnly& operator=(const PartlyReadOnly&) = delete;
    ~PartlyReadOnly() { ::munmap(data_, bytes_); }
    [[nodiscard]] std::byte* data() const noexcept { return data_; }

  private:
    static constexpr size_t kReadOnly = 64 << 10;
    std::byte* data_;
    size_t bytes_;
};

}  // namespace unisono::test
