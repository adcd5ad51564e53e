// The part of CUDA's driver that Unisono uses, on CPU memory, for tests.
//
// An allocation is a file in memory, which other processes map. A process that keeps a freed
// allocation open therefore reads old values. The handle of an allocation has no number, so memory
// that is allocated again at the same address may have the same handle, as with CUDA. Streams are
// threads that begin their work late.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace {

constexpr int kOk = 0, kInvalidValue = 1, kInvalidContext = 201, kNotSupported = 801;

struct Allocation {
    uint64_t size, number;
    int fd;
};
struct Handle {
    int64_t process, fd;
    uint64_t base, size;
    char end[32];
};
struct Operation {  // CUstreamBatchMemOpParams
    uint32_t operation;
    uint64_t address;
    uint32_t value, upper;
    uint32_t flags;
    uint64_t alias, end;
};
static_assert(sizeof(Handle) == 64 && sizeof(Operation) == 48);
struct Arrays {
    uint64_t source[64], target[64];
    int sources, targets;
};

std::mutex mutex;
std::map<uint64_t, Allocation> allocations;
std::map<std::string, uint64_t> opened;
uint64_t last_number = 0;
bool shares = true;
std::atomic<int> calls{0};
thread_local void* context = nullptr;

class Stream {
  public:
    Stream() : thread_([this] { run(); }) { thread_.detach(); }
    void put(std::function<void()> work) {
        {
            std::lock_guard lock(mutex_);
            work_.push_back(std::move(work));
        }
        changed_.notify_one();
    }

  private:
    void run() {
        for (unsigned turn = 1;; ++turn) {
            std::function<void()> work;
            {
                std::unique_lock lock(mutex_);
                changed_.wait(lock, [this] { return !work_.empty(); });
                work = std::move(work_.front());
                work_.pop_front();
            }
            if (turn % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(500));
            work();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> work_;
    std::thread thread_;
};

Stream& stream_of(void* handle) {
    static std::map<void*, std::unique_ptr<Stream>> streams;
    std::lock_guard lock(mutex);
    auto& found = streams[handle];
    if (!found) found = std::make_unique<Stream>();
    return *found;
}

int enqueue(void* stream, std::function<void()> work) {
    ++calls;
    if (!context) return kInvalidContext;
    stream_of(stream).put(std::move(work));
    return kOk;
}

const std::pair<const uint64_t, Allocation>* allocation_at(uint64_t pointer) {
    auto found = allocations.upper_bound(pointer);
    if (found == allocations.begin()) return nullptr;
    --found;
    return pointer < found->first + found->second.size ? &*found : nullptr;
}

void perform(const Operation& each) {
    auto* flag = reinterpret_cast<std::atomic<uint32_t>*>(each.address);
    if (each.operation == 2) {
        flag->store(each.value);
        return;
    }
    while (static_cast<int32_t>(flag->load() - each.value) < 0)
        std::this_thread::sleep_for(std::chrono::microseconds(50));
}

}  // namespace

extern "C" {

void emulated_begin() { context = &mutex; }
void emulated_shares(int does) { shares = does; }
int emulated_calls() { return calls.exchange(0); }
void emulated_put(void* stream, void (*work)()) { stream_of(stream).put(work); }

uint64_t emulated_allocate(uint64_t size, uint64_t at) {
    std::lock_guard lock(mutex);
    int fd = memfd_create("allocation", MFD_CLOEXEC);
    if (ftruncate(fd, size)) return 0;
    void* base = mmap(reinterpret_cast<void*>(at), size, PROT_READ | PROT_WRITE,
                      MAP_SHARED | (at ? MAP_FIXED : 0), fd, 0);
    allocations[reinterpret_cast<uint64_t>(base)] = {size, ++last_number, fd};
    return reinterpret_cast<uint64_t>(base);
}
void emulated_free(uint64_t base) {
    std::lock_guard lock(mutex);
    munmap(reinterpret_cast<void*>(base), allocations[base].size);
    close(allocations[base].fd);
    allocations.erase(base);
}

int cuCtxGetCurrent(void** found) {
    *found = context;
    return kOk;
}
int cuCtxSetCurrent(void* given) {
    context = given;
    return kOk;
}
int cuGetErrorName(int status, const char** name) {
    *name = status == kNotSupported ? "CUDA_ERROR_NOT_SUPPORTED" : "CUDA_ERROR_INVALID_VALUE";
    return kOk;
}
int cuPointerGetAttribute(void* data, int attribute, uint64_t pointer) {
    ++calls;
    std::lock_guard lock(mutex);
    const auto* found = allocation_at(pointer);
    if (attribute != 7 || !found) return kInvalidValue;
    std::memcpy(data, &found->second.number, 8);
    return kOk;
}
int cuMemGetAddressRange_v2(uint64_t* base, uint64_t* size, uint64_t pointer) {
    std::lock_guard lock(mutex);
    const auto* found = allocation_at(pointer);
    if (!found) return kInvalidValue;
    *base = found->first;
    *size = found->second.size;
    return kOk;
}
int cuIpcGetMemHandle(Handle* handle, uint64_t base) {
    std::lock_guard lock(mutex);
    if (!shares) return kNotSupported;
    const Allocation& found = allocations.at(base);
    *handle = Handle{getpid(), found.fd, base, found.size, {}};
    return kOk;
}
int cuIpcOpenMemHandle_v2(uint64_t* base, Handle handle, unsigned) {
    std::lock_guard lock(mutex);
    std::string key(reinterpret_cast<char*>(&handle), sizeof handle);
    if (!opened.contains(key)) {
        auto path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.fd);
        int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
        if (fd < 0) return kInvalidValue;
        void* found = mmap(nullptr, handle.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        opened[key] = reinterpret_cast<uint64_t>(found);
    }
    *base = opened[key];
    return kOk;
}
int cuIpcCloseMemHandle(uint64_t base) {
    std::lock_guard lock(mutex);
    for (auto each = opened.begin(); each != opened.end(); ++each)
        if (each->second == base) {
            opened.erase(each);
            return kOk;
        }
    return kInvalidValue;
}
int cuMemHostRegister_v2(void*, size_t, unsigned) { return kOk; }
int cuMemHostGetDevicePointer_v2(uint64_t* found, void* pointer, unsigned) {
    *found = reinterpret_cast<uint64_t>(pointer);
    return kOk;
}
int cuMemHostUnregister(void*) { return kOk; }
int cuStreamBatchMemOp_v2(void* stream, unsigned count, const Operation* given, unsigned) {
    return enqueue(stream, [operations = std::deque<Operation>(given, given + count)] {
        for (const Operation& each : operations) perform(each);
    });
}
int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t size, void* stream) {
    return enqueue(stream, [=] {
        std::memmove(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), size);
    });
}
int cuModuleLoadData(void** module, const char* file) {
    *module = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    return *module ? kOk : kInvalidValue;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
    *function = dlsym(module, name);
    return *function ? kOk : kInvalidValue;
}
int cuLaunchKernel(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   unsigned, void* stream, void** arguments, void**) {
    auto run = reinterpret_cast<void (*)(Arrays, uint64_t, int)>(function);
    auto arrays = *static_cast<Arrays*>(arguments[0]);
    auto count = *static_cast<uint64_t*>(arguments[1]);
    auto divisor = *static_cast<int*>(arguments[2]);
    return enqueue(stream, [=] { run(arrays, count, divisor); });
}

}  // extern "C"
