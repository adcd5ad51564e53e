#include "mpi/comm_world.h"

#include <atomic>
#include <memory>
#include <vector>

namespace unisono::mpi {
namespace {

Program provided{};
std::atomic<Communicator*> all{nullptr};
std::atomic<bool> ended{false};

}  // namespace

const Program& program() noexcept {
    return provided;
}

Communicator* join_world(std::string& error) {
    if (!provided.join) {
        error = "import unisono.jax or unisono.mlx before the library that needs this one";
        return nullptr;
    }
    ended = false;  // a program may end its processes, and begin again
    char text[kMostText] = "";
    double timeout_s = 0;
    unisono_group* const group = provided.join(&timeout_s, text, sizeof text);
    error = text;
    if (!group) return nullptr;
    group->api->retain(group);
    return new Communicator(group, timeout_s);
}

Communicator* world() noexcept {
    return all;
}

void set_world(Communicator* joined) {
    // Worlds live as long as the process: a thread may be in a call of one that is replaced.
    static auto& worlds = *new std::vector<std::unique_ptr<Communicator>>;
    worlds.emplace_back(joined);
    all = joined;
}

bool has_ended() noexcept {
    return ended;
}

void set_ended() noexcept {
    ended = true;
}

}  // namespace unisono::mpi

// ---- functions for Python

extern "C" __attribute__((visibility("default"))) void unisono_mpi_use(
    const unisono::mpi::Program* functions) {
    unisono::mpi::provided = *functions;
}

extern "C" __attribute__((visibility("default"))) void unisono_mpi_end() {
    unisono::mpi::set_ended();
}
