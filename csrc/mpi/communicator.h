// A communicator of MPI: a group of unisono.h with the calls that it has prepared.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>

#include "capi/unisono.h"

namespace unisono::mpi {

// Keeps the text of an error, and returns MPI's code for it. `code_of` never returns 0.
[[nodiscard]] int code_of(std::string text);
[[nodiscard]] std::string text_of(int code);

class Communicator {
  public:
    // Becomes an owner of `group`. Calls fail after `timeout_s` seconds.
    Communicator(unisono_group* group, double timeout_s) : group_(group), timeout_s_(timeout_s) {}
    // Makes a communicator whose calls fail with `error`: XLA ignores the error of a split.
    explicit Communicator(std::string error) : error_(std::move(error)) {}
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;
    ~Communicator();

    [[nodiscard]] int rank() const noexcept {
        return group_ ? static_cast<int>(group_->api->rank(group_)) : 0;
    }
    [[nodiscard]] int ranks() const noexcept {
        return group_ ? static_cast<int>(group_->api->ranks(group_)) : 1;
    }
    // Runs a collective; see unisono.h. Like all functions below, returns MPI's code.
    [[nodiscard]] int run(const unisono_collective& collective, const void* in, void* out);
    [[nodiscard]] int begin(const unisono_message& message, bool sends, unisono_request** request);
    [[nodiscard]] int send(const unisono_message& message);
    [[nodiscard]] int receive(const unisono_message& message);
    [[nodiscard]] int exchange(const unisono_message& out, const unisono_message& in);
    [[nodiscard]] int wait(unisono_request* request);
    [[nodiscard]] int split(int color, int key, Communicator** part);

  private:
    [[nodiscard]] unisono_call* prepared(const unisono_collective& collective, std::string& error);
    [[nodiscard]] unisono_call* prepare(const unisono_collective& collective, std::string& error);

    unisono_group* group_ = nullptr;
    double timeout_s_ = 0;
    std::string error_;
    std::mutex mutex_;  // guards calls_
    // By the operation, type and reduction of a call, then its count.
    std::unordered_map<uint64_t, std::unordered_map<uint64_t, unisono_call*>> calls_;
};

}  // namespace unisono::mpi
