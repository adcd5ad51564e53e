// Memory that ranks of one host lend to each other for the time of a call, so that it is copied
// once: read where it lies by the kernel (process_vm_readv). Also between threads of one process:
// the owner of memory may take it away once the call has failed, which the kernel survives.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <vector>

#include "memory/membership.h"

namespace unisono {

// A slot shows where lent memory is.
inline void show_loan(std::byte* slot, const std::byte* memory) noexcept {
    std::memcpy(slot, &memory, sizeof memory);
}
[[nodiscard]] inline const std::byte* shown_loan(const std::byte* slot) noexcept {
    const std::byte* memory;
    std::memcpy(&memory, slot, sizeof memory);
    return memory;
}

class Loans {
  public:
    Loans(View& view, Membership& members);
    Loans(const Loans&) = delete;
    Loans& operator=(const Loans&) = delete;

    // Whether this rank can read the memory of every other rank of its host, which all have joined.
    [[nodiscard]] bool reach_all() const noexcept;
    // Whether it can read the memory of this one.
    [[nodiscard]] bool reach(uint32_t rank) const noexcept;
    // Copies memory of a rank. Throws Error if that is gone, or its rank.
    void read(uint32_t rank, std::byte* dst, const std::byte* theirs, uint64_t bytes);

    // Whether the kernel lets this rank write to memory of those whose memory it can read.
    [[nodiscard]] static bool may_write() noexcept;
    // Copies into memory of a rank: where `to` says, two words of memory that both share. The
    // kernel reads them at the moment of the call, so that the rank may still change them. Returns
    // 0, or the error of a copy that is not whole.
    [[nodiscard]] int write(uint32_t rank, const std::atomic<uint64_t>* to, const std::byte* data,
                            uint64_t bytes) const noexcept;
    // Says why that was so. Throws Error.
    [[noreturn]] void fail_write(uint32_t rank, int error) { explain(rank, error, "write"); }

  private:
    // What only the process that a pid means to this one has at the address that it tells: pids of
    // other containers may mean another.
    struct Token {
        uint64_t process, rank;
    };
    [[nodiscard]] int64_t fetch(uint32_t rank, void* dst, const void* theirs,
                                uint64_t bytes) const noexcept;
    [[noreturn]] void explain(uint32_t rank, int error, const char* verb);

    View& view_;
    Membership& members_;
    Token token_;
};

}  // namespace unisono
