#include "memory/shared_heap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "core/error.h"

namespace unisono {
namespace {

constexpr uint64_t kHugePage = 2 << 20;
// Free ranges of at least this length return their pages to the kernel. Shorter ranges keep them,
// because the first use of a page costs as much as several copies of it. The limit is that of
// glibc's malloc.
constexpr uint64_t kLeastReturned = 32 << 20;
constexpr uint64_t kDetachedAtOnce = 64 << 20;

constexpr uint64_t round_up(uint64_t value, uint64_t unit) {
    return (value + unit - 1) / unit * unit;
}

uint64_t page_bytes() noexcept {
    static const auto bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    return bytes;
}

// Returns the alignment of an array. Long arrays may then have huge pages, and two arrays never
// share a cache line.
uint64_t unit_for(uint64_t bytes) {
    if (bytes >= kHugePage) return kHugePage;
    return bytes >= page_bytes() ? page_bytes() : kLine;
}

}  // namespace

// A forked child inherits the mapping, because it may read the arrays of its parent.
OwnHeap::OwnHeap(int fd, uint64_t offset, uint64_t bytes, bool keeps_pages)
    : fd_(fd),
      offset_(offset),
      bytes_(bytes),
      keeps_pages_(keeps_pages),
      owner_pid_(::getpid()),
      gaps_{{0, bytes}} {
    void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd,
                        static_cast<off_t>(offset));
    if (base == MAP_FAILED) throw_errno("mmap of a heap for shared arrays");
    ::madvise(base, bytes, MADV_HUGEPAGE);
    ::madvise(base, bytes, MADV_DONTDUMP);
    base_ = static_cast<std::byte*>(base);
}

// Other mappings of the segment may remain, so the pages are given back one by one.
OwnHeap::~OwnHeap() {
    drop_pages(0, bytes_);
    ::munmap(base_, bytes_);
}

// Takes the shortest free range that is long enough, so that long ranges stay whole.
std::shared_ptr<std::byte> OwnHeap::allocate(uint64_t bytes) {
    if (bytes > bytes_) return nullptr;
    const uint64_t unit = unit_for(bytes), length = round_up(std::max<uint64_t>(bytes, 1), unit);
    const std::lock_guard lock(mutex_);
    auto best = gaps_.end();
    for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
        const uint64_t lost = round_up(gap->first, unit) - gap->first;
        const bool fits = lost < gap->second && length <= gap->second - lost;
        if (fits && (best == gaps_.end() || gap->second < best->second)) best = gap;
    }
    if (best == gaps_.end()) return nullptr;
    const auto [start, room] = *best;
    const uint64_t offset = round_up(start, unit), end = offset + length;
    // The entries are made before anything changes, since this may throw.
    if (end < start + room) gaps_.emplace(end, start + room - end);
    if (offset > start) {
        gaps_[start] = offset - start;
    } else {
        gaps_.erase(start);
    }
    used_bytes_.fetch_add(length, std::memory_order_relaxed);
    return {base_ + offset, [heap = shared_from_this(), offset, length](std::byte*) noexcept {
                heap->free(offset, length);
            }};
}

void OwnHeap::free(uint64_t offset, uint64_t bytes) noexcept {
    // A forked child may find the lock held for ever, by a thread that exists only in the parent.
    if (::getpid() != owner_pid_) return;
    used_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
    if (bytes >= kLeastReturned) drop_pages(offset, bytes);
    const std::lock_guard lock(mutex_);
    auto next = gaps_.lower_bound(offset);
    if (next != gaps_.end() && next->first == offset + bytes) {
        bytes += next->second;
        next = gaps_.erase(next);
    }
    if (next != gaps_.begin()) {
        const auto before = std::prev(next);
        if (before->first + before->second == offset) {
            before->second += bytes;
            return;
        }
    }
    try {
        gaps_.emplace(offset, bytes);
    } catch (const std::exception&) {  // no memory for the entry: the range stays unused
    }
}

// A forked child must not take the pages of its parent. Detached pages are not in the file.
void OwnHeap::drop_pages(uint64_t offset, uint64_t bytes) noexcept {
    if (::getpid() != owner_pid_) return;
    if (::madvise(base_ + offset, bytes, MADV_REMOVE) != 0)
        ::madvise(base_ + offset, bytes, MADV_DONTNEED);
}

// Maps runs of pages that are not yet detached: a detached page has changed since, and the file
// does not have its contents.
void OwnHeap::detach(uint64_t offset, uint64_t bytes) noexcept {
    if (::getpid() != owner_pid_ || bytes == 0) return;
    const uint64_t page = page_bytes(), end = round_up(offset + bytes, page);
    uint64_t run = offset / page * page;
    const HeapRange pages{run, end - run};
    for (uint64_t at = run; at < end; at += page) {
        const bool detached = is_detached(at);
        if (!detached && at + page < end && at + page - run < kDetachedAtOnce) continue;
        const uint64_t run_end = detached ? at : at + page;
        if (run < run_end) make_private(run, run_end - run);
        run = at + page;
    }
    try {
        detached_.push_back(pages);
    } catch (const std::exception&) {  // no memory; the array is rarely detached again
    }
}

bool OwnHeap::is_detached(uint64_t page) const noexcept {
    return std::any_of(detached_.begin(), detached_.end(), [page](const HeapRange& range) {
        return range.offset <= page && page - range.offset < range.bytes;
    });
}

// A private mapping of the same file still shows the file's pages. The first write to each page
// makes a private copy, in one step, so no write of another thread of this process is lost. After
// that, the file's pages are given back.
void OwnHeap::make_private(uint64_t offset, uint64_t bytes) noexcept {
    const auto in_file = static_cast<off_t>(offset_ + offset);
    if (::mmap(base_ + offset, bytes, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd_, in_file) == MAP_FAILED)
        return;
    for (uint64_t at = 0; at < bytes; at += page_bytes())
        reinterpret_cast<std::atomic<uint8_t>*>(base_ + offset + at)->fetch_or(0);
    if (keeps_pages_) return;
    ::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, in_file,
                static_cast<off_t>(bytes));
}

SharedHeap::~SharedHeap() {
    // In a forked child this address range may hold other memory by now.
    std::byte* const heaps = heaps_.load();
    if (heaps == nullptr || ::getpid() != mapper_pid_ || view_.kept()) return;
    const SegmentShape& shape = view_.segment().shape();
    ::munmap(heaps, shape.heap_bytes * shape.ranks);
}

std::shared_ptr<std::byte> SharedHeap::allocate(uint64_t bytes) {
    const Segment& segment = view_.segment();
    const uint64_t each = segment.shape().heap_bytes;
    if (each == 0)
        throw Error(Fault::unsupported,
                    "this group has no shared heap, since its memory is not a memfd");
    const std::lock_guard lock(mutex_);
    if (detached_)
        throw Error(Fault::aborted, "this group has failed, so it makes no more shared arrays");
    if (!own_) {
        const uint64_t place = view_.place(view_.rank());
        own_ = std::make_shared<OwnHeap>(segment.fd(), segment.heaps_offset() + place * each, each,
                                         !view_.away().empty());
        own_base_.store(own_->base(), std::memory_order_release);
        made_.store(true, std::memory_order_release);
    }
    return own_->allocate(bytes);
}

uint64_t SharedHeap::used_bytes() const noexcept {
    return made_.load(std::memory_order_acquire) ? own_->used_bytes() : 0;
}

void SharedHeap::expose(const HeapRange& range) {
    const std::lock_guard lock(mutex_);
    exposed_.push_back(range);
}

void SharedHeap::conceal(const HeapRange& range) noexcept {
    const std::lock_guard lock(mutex_);
    const auto found = std::find(exposed_.begin(), exposed_.end(), range);
    if (found != exposed_.end()) exposed_.erase(found);
}

void SharedHeap::detach(const std::byte* memory, uint64_t bytes) noexcept {
    const std::lock_guard lock(mutex_);
    if (!own_) return;
    const auto offset =
        reinterpret_cast<uintptr_t>(memory) - reinterpret_cast<uintptr_t>(own_->base());
    if (offset < own_->bytes()) detach_locked({offset, bytes});
}

void SharedHeap::detach_exposed() noexcept {
    const std::lock_guard lock(mutex_);
    for (const HeapRange& range : exposed_) detach_locked(range);
    exposed_.clear();
}

void SharedHeap::detach_locked(const HeapRange& range) noexcept {
    own_->detach(range.offset, range.bytes);
    own_base_.store(nullptr);
    detached_ = true;
}

std::byte* SharedHeap::at(uint32_t rank, uint64_t offset, uint64_t bytes) {
    const uint64_t each = view_.segment().shape().heap_bytes;
    if (!view_.local(rank))
        throw Error(Fault::invalid, "rank " + std::to_string(rank) +
                                        " is on another host, so its heap cannot be read here");
    if (offset > each || bytes > each - offset)
        throw Error(Fault::mismatch, "rank " + std::to_string(rank) + " shares " +
                                         std::to_string(bytes) + " bytes at " +
                                         std::to_string(offset) + ", outside of its heap");
    std::byte* heaps = heaps_.load(std::memory_order_acquire);
    if (heaps == nullptr) heaps = map_all();
    return heaps + view_.place(rank) * each + offset;
}

std::byte* SharedHeap::map_all() {
    const std::lock_guard lock(mutex_);
    if (std::byte* const heaps = heaps_.load()) return heaps;
    const Segment& segment = view_.segment();
    const uint64_t bytes = segment.shape().heap_bytes * segment.shape().ranks;
    void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                        segment.fd(), static_cast<off_t>(segment.heaps_offset()));
    if (base == MAP_FAILED) throw_errno("mmap of the heaps of all ranks");
    ::madvise(base, bytes, MADV_DONTFORK);
    ::madvise(base, bytes, MADV_HUGEPAGE);
    ::madvise(base, bytes, MADV_DONTDUMP);
    mapper_pid_ = ::getpid();
    heaps_.store(static_cast<std::byte*>(base), std::memory_order_release);
    return static_cast<std::byte*>(base);
}

}  // namespace unisono
