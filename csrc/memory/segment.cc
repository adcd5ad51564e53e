#include "memory/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "core/error.h"

namespace unisono {
namespace {

constexpr uint64_t kPage = 4096, kHugePage = 2 << 20;
constexpr uint64_t kPairSlots = 512, kFewPairSlots = 128, kLeastForManySlots = 64 << 10;
constexpr uint64_t kPairBytes = 2 << 20, kLeastPairBytes = 4 << 10;
// Usual limit for the total bytes of all pairs. With very many ranks, the total exceeds this limit,
// because each pair has a minimum size.
constexpr uint64_t kUsualPairs = 256 << 20;
constexpr uint32_t kMaxRanks = 4096;
// Limit that the total bytes of all pairs never exceed, because a process cannot map much more.
constexpr uint64_t kMostPairs = 1ULL << 46;
// Limit of the address space of all heaps, for the same reason.
constexpr uint64_t kMostHeaps = 1ULL << 44;

constexpr uint64_t round_up(uint64_t value, uint64_t unit) {
    return (value + unit - 1) / unit * unit;
}

// Depths and buffer sizes of the first two size classes. SegmentShape has those of the last class.
constexpr uint64_t kTinyDepth = 128, kTinyBytes = 256;
constexpr uint64_t kSmallDepth = 16, kSmallBytes = 4096;

// Returns the depth and the buffer size of each size class. The addresses are still null.
std::array<SizeClass, kSizeClasses> size_classes_of(const SegmentShape& s) {
    return {{{nullptr, kTinyDepth, kTinyBytes},
             {nullptr, kSmallDepth, kSmallBytes},
             {nullptr, s.depth, s.buffer_bytes}}};
}

struct Offsets {
    uint64_t ranks, staging, pairs, each_pair, mapped, heaps, total;
};

Offsets offsets_of(const SegmentShape& s) {
    Offsets o{};
    o.ranks = round_up(sizeof(GroupControl), kPage);
    o.staging = round_up(o.ranks + s.ranks * sizeof(RankControl), kPage);
    o.pairs = o.staging;
    for (const SizeClass& size_class : size_classes_of(s)) o.pairs += size_class.bytes(s.ranks);
    o.each_pair = round_up(sizeof(p2p::Pair) + s.pair_slots * sizeof(p2p::Slot) + s.pair_bytes +
                               kStagedBlocks * s.staged_block_bytes(),
                           kPage);
    o.mapped = o.pairs + o.each_pair * s.ranks * s.ranks;
    o.heaps = round_up(o.mapped, kHugePage);
    o.total = s.heap_bytes == 0 ? o.mapped : o.heaps + s.heap_bytes * s.ranks;
    return o;
}

bool plausible(const SegmentShape& s) {
    return s.ranks >= 1 && s.ranks <= kMaxRanks && s.depth >= 1 && s.depth <= 64 &&
           s.buffer_bytes >= kPage && s.buffer_bytes <= (1ULL << 32) &&
           s.buffer_bytes % kLine == 0 && std::has_single_bit(s.pair_slots) &&
           s.pair_slots <= 4096 && std::has_single_bit(s.pair_bytes) && s.pair_bytes >= kLine &&
           s.pair_bytes <= (1ULL << 30) && s.heap_bytes % kHugePage == 0 &&
           s.heap_bytes <= kMostHeaps / s.ranks &&
           // This limits the size of all pairs. The bounds above keep all other products in
           // offsets_of() far below 2^64, so no size wraps around.
           offsets_of(s).each_pair <= kMostPairs / s.ranks / s.ranks;
}

// Returns the address space of a rank's heap: as much as the machine has memory, because no array
// is longer.
uint64_t heap_bytes_for(uint32_t ranks) {
    const auto memory = static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
                        static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    return std::min(round_up(memory, kHugePage), kMostHeaps / ranks / kHugePage * kHugePage);
}

// Returns the limit of this process for the length of a file (ulimit -f). The kernel ends a process
// that exceeds it.
uint64_t most_file_bytes() {
    rlimit most{};
    return ::getrlimit(RLIMIT_FSIZE, &most) == 0 ? uint64_t{most.rlim_cur} : ~uint64_t{0};
}

// Returns the shape that the file's first page states. It has no ranks if the shape is not
// plausible.
SegmentShape shape_in(int fd) {
    void* page = ::mmap(nullptr, sizeof(GroupControl), PROT_READ, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED) throw_errno("mmap of the group's segment");
    const auto& g = *static_cast<const GroupControl*>(page);
    const bool made = g.magic == kMagic;
    const SegmentShape shape{g.ranks,      g.depth,      g.buffer_bytes,
                             g.pair_slots, g.pair_bytes, g.heap_bytes};
    ::munmap(page, sizeof(GroupControl));
    return made && plausible(shape) ? shape : SegmentShape{};
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
    other.fd_ = fd_.exchange(other.fd_);
    return *this;
}

Descriptor::~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
}

int Descriptor::release() noexcept {
    return fd_.exchange(-1, std::memory_order_relaxed);
}

SegmentShape shape_for(uint32_t ranks, uint32_t cores, uint64_t staging_bytes) {
    // With a third block in flight, a rank need not wait for a peer that is slightly late. With
    // more ranks than cores, the ranks take turns on the cores, so a third block would gain nothing
    // and only need more cache.
    if (ranks == 0 || ranks > kMaxRanks)
        throw Error(Fault::invalid, "a group has 1 to " + std::to_string(kMaxRanks) +
                                        " ranks, got " + std::to_string(ranks));
    const uint32_t depth = ranks <= cores ? 3 : 2;
    // In a direct exchange, a buffer holds a slot for each peer.
    const uint64_t least = uint64_t{ranks} * 16 * 1024;
    const uint64_t buffer = std::max(staging_bytes / (uint64_t{ranks} * depth), least);
    // With many ranks, most pairs exchange few messages.
    const uint64_t each = kUsualPairs / ranks / ranks / (1 + kStagedBlocks);
    const uint64_t ring = std::clamp(std::bit_floor(each), kLeastPairBytes, kPairBytes);
    return {ranks,
            depth,
            round_up(buffer, kPage),
            ring < kLeastForManySlots ? kFewPairSlots : kPairSlots,
            ring,
            heap_bytes_for(ranks)};
}

Descriptor create_segment(const SegmentShape& shape, const std::array<uint8_t, 16>& nonce) {
    Descriptor fd(::memfd_create("unisono", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (fd.get() < 0) throw_errno("memfd_create of the group's segment");
    lay_out_segment(fd.get(), shape, nonce);
    return fd;
}

void lay_out_segment(int fd, SegmentShape shape, const std::array<uint8_t, 16>& nonce) {
    const bool sealed = ::fcntl(fd, F_GET_SEALS) == 0;  // a memfd that can be sealed
    // In a file system with a limit, an access to a heap could exceed the free space and fault.
    if (!sealed || offsets_of(shape).total > most_file_bytes()) shape.heap_bytes = 0;
    if (!plausible(shape)) {
        throw Error(Fault::invalid, "a group of " + std::to_string(shape.ranks) +
                                        " ranks cannot have " + std::to_string(shape.depth) +
                                        " blocks of " + std::to_string(shape.buffer_bytes) +
                                        " bytes of staging each: change UNISONO_STAGING_BYTES");
    }
    const Offsets o = offsets_of(shape);
    const auto size = static_cast<off_t>(o.total);
    if (sealed) {
        if (::ftruncate(fd, size) != 0) throw_errno("ftruncate of the group's segment");
        // Seals the size. Otherwise a process could shorten the file, and accesses of the others
        // would fault.
        if (::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
            throw_errno("sealing the group's segment");
    } else if (const int code = ::posix_fallocate(fd, 0, size)) {
        // Allocates all pages now. Otherwise the first access beyond the file system's free space
        // would fault.
        errno = code;
        throw_errno("allocating the group's segment of " + std::to_string(o.total) + " bytes");
    }
    void* base = ::mmap(nullptr, o.staging, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) throw_errno("mmap of the group's segment");
    auto* bytes = static_cast<std::byte*>(base);
    auto* group = new (base) GroupControl{};
    group->ranks = shape.ranks;
    group->depth = shape.depth;
    group->buffer_bytes = shape.buffer_bytes;
    group->pair_slots = shape.pair_slots;
    group->pair_bytes = shape.pair_bytes;
    group->heap_bytes = shape.heap_bytes;
    std::copy(nonce.begin(), nonce.end(), group->nonce);
    for (uint32_t r = 0; r < shape.ranks; ++r)
        new (bytes + o.ranks + r * sizeof(RankControl)) RankControl{};
    group->magic = kMagic;
    ::munmap(base, o.staging);
}

Segment::Segment(Descriptor fd) : fd_(std::move(fd)) {
    struct stat info{};
    if (::fstat(fd_.get(), &info) != 0) throw_errno("fstat of the group's segment");
    const auto file_bytes = static_cast<uint64_t>(info.st_size);
    if (file_bytes < sizeof(GroupControl))
        throw Error(Fault::invalid, "the group's segment has " + std::to_string(file_bytes) +
                                        " bytes, expected at least " +
                                        std::to_string(sizeof(GroupControl)));
    shape_ = shape_in(fd_.get());
    if (shape_.ranks == 0 || offsets_of(shape_).total != file_bytes)
        throw Error(Fault::invalid, "the group's segment was not made by this version of unisono");
    const Offsets o = offsets_of(shape_);
    bytes_ = o.mapped;
    void* base = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    if (base == MAP_FAILED) throw_errno("mmap of the group's segment");
    base_ = static_cast<std::byte*>(base);
    owner_pid_ = ::getpid();
    // A forked child must not write here, so it does not inherit the mapping.
    ::madvise(base, bytes_, MADV_DONTFORK);
    ranks_ = reinterpret_cast<RankControl*>(base_ + o.ranks);
    size_classes_ = size_classes_of(shape_);
    std::byte* place = base_ + o.staging;
    for (SizeClass& size_class : size_classes_)
        place = (size_class.base = place) + size_class.bytes(shape_.ranks);
    pairs_ = base_ + o.pairs;
    each_pair_ = o.each_pair;
    heaps_offset_ = o.heaps;
}

Segment::~Segment() {
    // In a forked child this address range may hold other memory by now.
    if (!kept_ && ::getpid() == owner_pid_) ::munmap(base_, bytes_);
}

void Segment::give_back() noexcept {
    if (kept_ || ::getpid() != owner_pid_) return;
    void* left = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (left == MAP_FAILED) return;  // the destructor will unmap the memory
    ::madvise(left, bytes_, MADV_DONTFORK);
    const auto* from = reinterpret_cast<const std::atomic<uint64_t>*>(base_);
    auto* to = static_cast<uint64_t*>(left);
    for (uint64_t i = 0; i < offsets_of(shape_).staging / sizeof(uint64_t); ++i)
        to[i] = from[i].load(std::memory_order_relaxed);  // Other ranks may still write.
    // Replaces the mapping in one step, so other threads never find the range unmapped.
    if (::mremap(left, bytes_, bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, base_) == MAP_FAILED)
        ::munmap(left, bytes_);
}

GroupControl& Segment::group() const noexcept {
    return *reinterpret_cast<GroupControl*>(base_);
}

PairMemory Segment::pair(uint32_t from, uint32_t to) const noexcept {
    // Fresh memfd pages are zero, and an empty pair is all zeros.
    std::byte* at = pairs_ + (uint64_t{from} * shape_.ranks + to) * each_pair_;
    PairMemory pair{};
    pair.shared = reinterpret_cast<p2p::Pair*>(at);
    pair.slots = reinterpret_cast<p2p::Slot*>(at += sizeof(p2p::Pair));
    pair.bytes = at += shape_.pair_slots * sizeof(p2p::Slot);
    pair.staging = at + shape_.pair_bytes;
    return pair;
}

}  // namespace unisono
