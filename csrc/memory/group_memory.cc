#include "memory/group_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>
#include <numeric>
#include <string>
#include <utility>

#include "core/error.h"

namespace unisono {
namespace {

constexpr size_t kPage = 4096;

}  // namespace

HostRanks HostRanks::one_host(uint32_t ranks) {
    HostRanks host_ranks{ranks, std::vector<uint32_t>(ranks)};
    std::iota(host_ranks.here.begin(), host_ranks.here.end(), 0U);
    return host_ranks;
}

View::View(Segment& segment, uint32_t rank, HostRanks host_ranks)
    : segment_(segment), rank_(rank), seen_(host_ranks.ranks), here_(std::move(host_ranks.here)) {
    const uint32_t ranks = host_ranks.ranks;
    if (here_.size() != segment.shape().ranks)
        throw Error(Fault::invalid,
                    "the segment has places for " + std::to_string(segment.shape().ranks) +
                        " ranks, but this host has " + std::to_string(here_.size()));
    for (uint32_t place = 0; place < here_.size(); ++place) {
        const uint32_t r = here_[place];
        if (r >= ranks || local(r))
            throw Error(Fault::invalid, "rank " + std::to_string(r) + " at place " +
                                            std::to_string(place) +
                                            " of the segment: expected ranks below " +
                                            std::to_string(ranks) + ", each at one place");
        seen_[r].place = place;
        seen_[r].control = &segment.rank(place);
        for (size_t s = 0; s < kSizeClasses; ++s)
            seen_[r].buffers[s] = segment.size_class(s).buffer(place, 0);
    }
    if (rank >= ranks || !local(rank))
        throw Error(Fault::invalid, "rank " + std::to_string(rank) +
                                        " is not one of the group's ranks on this host");
    for (uint32_t r = 0; r < ranks; ++r) {
        if (!local(r)) away_.push_back(r);
    }
    if (!away_.empty()) mirror_away();
}

// Makes one mapping for all mirrors, which are this rank's copies of the memory of ranks on other
// hosts. Pages that are never used take no memory.
void View::mirror_away() {
    size_t each = (sizeof(RankControl) + kPage - 1) / kPage * kPage;
    for (size_t s = 0; s < kSizeClasses; ++s) each += segment_.size_class(s).bytes(1);
    each = (each + kPage - 1) / kPage * kPage;
    mirrors_bytes_ = each * away_.size();
    void* base = ::mmap(nullptr, mirrors_bytes_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) throw_errno("mmap of the mirrors of ranks on other hosts");
    ::madvise(base, mirrors_bytes_, MADV_DONTFORK);
    owner_pid_ = ::getpid();
    mirrors_ = static_cast<std::byte*>(base);
    std::byte* place = mirrors_;
    for (const uint32_t r : away_) {
        seen_[r].control = new (place) RankControl{};
        std::byte* buffers = place + each;  // the buffers are the last part of each mirror
        for (size_t s = kSizeClasses; s-- > 0;) {
            buffers -= segment_.size_class(s).bytes(1);
            seen_[r].buffers[s] = buffers;
        }
        place += each;
    }
}

void View::give_back() noexcept {
    if (kept_ || (mirrors_ && ::getpid() != owner_pid_)) return;
    const size_t control = (sizeof(RankControl) + kPage - 1) / kPage * kPage;
    const size_t each = mirrors_ ? mirrors_bytes_ / away_.size() : 0;
    for (size_t i = 0; each && i < away_.size(); ++i)
        ::madvise(mirrors_ + i * each + control, each - control, MADV_DONTNEED);
    segment_.give_back();
}

View::~View() {
    // In a forked child this address range may hold other memory by now.
    if (mirrors_ && !kept_ && ::getpid() == owner_pid_) ::munmap(mirrors_, mirrors_bytes_);
}

}  // namespace unisono
