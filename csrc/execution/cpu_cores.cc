#include "execution/cpu_cores.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "core/control_words.h"
#include "core/cpu_features.h"
#include "memory/waiter.h"

namespace unisono {
namespace {

cpu_set_t only(int core) noexcept {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    return set;
}

void pin(int core) {
    const cpu_set_t set = only(core);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

// Moves the calling thread to one of these cores, then restores the cores that it may use.
bool visit(const cpu_set_t& cores) noexcept {
    cpu_set_t before;
    if (::sched_getaffinity(0, sizeof before, &before) != 0 ||
        ::sched_setaffinity(0, sizeof cores, &cores) != 0)
        return false;
    ::sched_setaffinity(0, sizeof before, &before);
    return true;
}

struct alignas(2 * kLine) Word {
    std::atomic<uint32_t> value{0};
};

// Polls until the word equals `wanted`. Yields at intervals, in case the peer needs this core.
void await(const Word& word, uint32_t wanted) {
    for (unsigned looks = 1; word.value.load(std::memory_order_acquire) != wanted; ++looks) {
        if (looks % 4096 == 0) ::sched_yield();
    }
}

// Reads the size from /sys. In a virtual machine, sysconf returns a wrong size: it multiplies by
// the number of cores that share a cache on the physical host, not by the number of cores of the
// virtual machine.
uint64_t read_last_level_cache_bytes() {
    constexpr uint64_t kAssumed = 32 << 20;
    uint64_t found = 0;
    for (int index = 0; index < 8; ++index) {
        std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) +
                           "/size");
        uint64_t size = 0;
        char unit = 0;
        if (file >> size >> unit) found = std::max(found, size << (unit == 'M' ? 20 : 10));
    }
    return found ? found : kAssumed;
}

}  // namespace

std::vector<int> usable_core_numbers() {
    cpu_set_t set;
    CPU_ZERO(&set);
    std::vector<int> found;
    if (::sched_getaffinity(0, sizeof set, &set) != 0) return found;
    for (int c = 0; c < CPU_SETSIZE; ++c) {
        if (CPU_ISSET(c, &set)) found.push_back(c);
    }
    return found;
}

bool meshed_cores() noexcept {
    return cpu_features().intel && cpu_features().avx512;
}

unsigned usable_cores() noexcept {
    return static_cast<unsigned>(std::max<size_t>(1, usable_core_numbers().size()));
}

uint64_t private_cache_bytes() noexcept {
    // The size is read once, because every call of one block needs it.
    static const auto bytes = static_cast<uint64_t>(std::max(0L, ::sysconf(_SC_LEVEL2_CACHE_SIZE)));
    return bytes;
}

uint64_t last_level_cache_bytes() {
    // The size is computed once, because every plan needs it.
    static const uint64_t bytes = read_last_level_cache_bytes();
    return bytes;
}

void settle_on_core(unsigned index) noexcept {
    const std::vector<int> usable = usable_core_numbers();
    if (usable.size() >= 2) go_to_core(usable[index % usable.size()]);
}

bool go_to_core(int core) noexcept {
    return visit(only(core));
}

bool leave_core(int core) noexcept {
    cpu_set_t others;
    if (::sched_getaffinity(0, sizeof others, &others) != 0) return false;
    CPU_CLR(core, &others);
    return CPU_COUNT(&others) > 0 && visit(others);
}

double probe_core_latency_s(unsigned samples) {
    constexpr uint32_t kTrips = 20;  // round trips per sample
    const std::vector<int> usable = usable_core_numbers();
    if (usable.size() < 2 || samples == 0) return std::numeric_limits<double>::quiet_NaN();
    Word ping, pong;
    std::vector<double> one_way_s;
    std::thread echo([&] {
        pin(usable[1]);
        for (uint32_t i = 1; i <= samples * kTrips; ++i) {
            await(ping, i);
            pong.value.store(i, std::memory_order_release);
        }
    });
    std::thread caller([&] {
        pin(usable[0]);
        uint32_t trip = 0;
        for (unsigned s = 0; s < samples; ++s) {
            const auto start = std::chrono::steady_clock::now();
            for (uint32_t i = 0; i < kTrips; ++i) {
                ping.value.store(++trip, std::memory_order_release);
                await(pong, trip);
            }
            const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
            one_way_s.push_back(took.count() / (2 * kTrips));
        }
    });
    caller.join();
    echo.join();
    const auto middle = one_way_s.begin() + static_cast<std::ptrdiff_t>(one_way_s.size() / 2);
    std::nth_element(one_way_s.begin(), middle, one_way_s.end());
    return *middle;
}

}  // namespace unisono
