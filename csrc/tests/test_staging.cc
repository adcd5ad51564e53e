// Tests of the staging ring beside a record of all blocks: no block takes memory of a block that is
// not finished, and none takes memory before all that used it can be finished.
#include <random>
#include <vector>

#include "execution/staging_ring.h"
#include "tests/calls.h"
#include "tests/report.h"

namespace {

using namespace unisono;
using namespace unisono::test;

struct Block {
    const std::byte* begin;
    uint64_t bytes, progress;
    [[nodiscard]] bool overlaps(const Block& other) const {
        return begin < other.begin + other.bytes && other.begin < begin + bytes;
    }
};

struct Random {
    std::mt19937 bits;
    uint64_t below(uint64_t limit) { return bits() % limit; }
};

// Makes calls as the executor does: in each step a block begins, and the block `lead` steps before
// ends.
void check_calls(Report& report, StagingRing ring, uint64_t most_bytes, uint32_t seed) {
    Random random{std::mt19937(seed)};
    std::vector<Block> ended;
    uint64_t progress = 1;
    for (int call = 0; call < 300; ++call) {
        const uint64_t bytes = random.below(3) == 0 ? most_bytes : random.below(most_bytes + 1);
        const uint64_t blocks = random.below(4) == 0 ? 1 + random.below(12) : 1;
        const uint64_t lead = random.below(std::min(ring.depth(), blocks));
        ring.begin(bytes, lead, blocks);
        std::vector<Block> open;
        for (uint64_t step = 0; step < blocks + lead; ++step) {
            if (step < blocks) {
                const uint64_t ahead = std::min(step, lead);
                const Block block{ring.buffer(0, ahead), bytes, 0};
                const uint64_t reusable_at = ring.reusable_at(ahead);
                for (const Block& other : open)
                    report.check(!block.overlaps(other), "two unfinished blocks");
                for (const Block& other : ended) {
                    report.check(!block.overlaps(other) || other.progress <= reusable_at,
                                 "memory that may be in use");
                }
                report.check(reusable_at < progress, "a wait for this call");
                open.push_back(block);
            }
            if (step < lead) continue;
            open.front().progress = progress;
            ended.push_back(open.front());
            open.erase(open.begin());
            ring.end(progress++);
        }
    }
}

void check_length(Report& report, const View& view, uint64_t ring_bytes) {
    StagingRing ring = StagingRing::of_any_length(view, 2);
    constexpr uint64_t bytes = 96 << 10;
    ring.begin(bytes, 0, 1);
    const std::byte* const first = ring.buffer(0, 0);
    uint64_t used = 0;
    do {
        ring.end(++used);
        ring.begin(bytes, 0, 1);
    } while (ring.buffer(0, 0) != first);
    report.check(used == ring_bytes / bytes, "short calls use the whole ring");
    ring.begin(bytes, 0, 20);
    for (used = 0; used == 0 || ring.buffer(0, 0) != first; ++used) ring.end(100 + used);
    report.check(used == ring.depth(), "a long call uses a part of the ring");
}

// A rank may not be so far ahead that the history of calls loses a call that another rank makes.
void check_run_ahead(Report& report, const View& view) {
    StagingRing ring = StagingRing::of_any_length(view, 2);
    for (uint64_t progress = 1; progress < 500; ++progress) {
        ring.begin(1024, 0, 1);
        const uint64_t reusable_at = ring.reusable_at(0);
        report.check(progress <= 65 || reusable_at >= progress - 65, "blocks in flight");
        ring.end(progress);
    }
}

}  // namespace

int main() {
    Report report;
    SegmentShape shape = shape_for(2, 2, 16 << 20);
    Segment segment(create_segment(shape, World::nonce));
    const View view(segment, 0, HostRanks::one_host(2));
    const uint64_t buffer = shape.buffer_bytes;
    for (uint32_t seed = 0; seed < 20; ++seed) {
        check_calls(report, StagingRing::of_any_length(view, 2), buffer, seed);
        check_calls(report, StagingRing::of_any_length(view, 2), 200'000, seed);
        check_calls(report, StagingRing::with_buffers(view, 2), buffer, seed);
        check_calls(report, StagingRing::with_buffers(view, 1, 2), 2048, seed);
    }
    check_run_ahead(report, view);
    check_length(report, view, std::min(shape.depth * buffer, StagingRing::usual_bytes()));
    return report.finish();
}
