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

Seats Seats::one_host(uint32_t ranks) {
    Seats seats{ranks, std::vector<uint32_t>(ranks)};
    std::iota(seats.here.begin(), seats.here.end(), 0U);
    return seats;
}

View::View(Segment& segment, uint32_t rank, Seats seats)
    : segment_(segment), rank_(rank), seen_(seats.ranks), here_(std::move(seats.here)) {
    const uint32_t ranks = seats.ranks;
    if (here_.size() != segment.shape().ranks)
        throw Error(Fault::invalid, "the segment has places for " +
                                        std::to_string(segment.shape().ranks) +
                                        " ranks, this host has " + std::to_string(here_.size()));
    for (uint32_t place = 0; place < here_.size(); ++place) {
        const uint32_t r = here_[place];
        if (r >= ranks || local(r))
            throw Error(Fault::invalid, "rank " + std::to_string(r) + " at place " +
                                            std::to_string(place) +
                                            " of the segment: expected ranks below " +
                                            std::to_string(ranks) + ", each at one place");
        seen_[r].place = place;
        seen_[r].control = &segment.rank(place);
        for (size_t s = 0; s < kStrips; ++s) seen_[r].areas[s] = segment.strip(s).area(place, 0);
    }
    if (rank >= ranks || !local(rank))
        throw Error(Fault::invalid, "rank " + std::to_string(rank) +
                                        " is not one of the group's ranks on this host");
    for (uint32_t r = 0; r < ranks; ++r) {
        if (!local(r)) away_.push_back(r);
    }
    if (!away_.empty()) mirror_away();
}

// One mapping for all: only the pages that are used ever become memory.
void View::mirror_away() {
    size_t each = (sizeof(RankControl) + kPage - 1) / kPage * kPage;
    for (size_t s = 0; s < kStrips; ++s) each += segment_.strip(s).bytes(1);
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
        std::byte* areas = place + each;  // the strips end where the next mirror begins
        for (size_t s = kStrips; s-- > 0;) {
            areas -= segment_.strip(s).bytes(1);
            seen_[r].areas[s] = areas;
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
    // In a forked child the range may hold something else by now.
    if (mirrors_ && !kept_ && ::getpid() == owner_pid_) ::munmap(mirrors_, mirrors_bytes_);
}

}  // namespace unisono
