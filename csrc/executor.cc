#include "executor.h"

#include <algorithm>
#include <array>
#include <string>

namespace unisono {

uint64_t part_bytes(uint64_t piece_bytes, uint32_t parts, size_t element_bytes) noexcept {
    if (parts == 1) return piece_bytes;
    const uint64_t count = piece_bytes / element_bytes;
    const uint64_t unit = std::max<uint64_t>(1, kLine / element_bytes);
    const uint64_t each = (count + parts - 1) / parts;
    return (each + unit - 1) / unit * unit * element_bytes;
}

Executor::Executor(Segment& segment, Membership& members, Waiter waiter, StoreRule stores)
    : segment_(segment),
      members_(members),
      waiter_(waiter),
      stores_(stores),
      distance_(members.ranks()),
      own_(segment.rank(members.rank())),
      agreement_(segment, members),
      lanes_{Lane(segment.strip(0)), Lane(segment.strip(1)), Lane(segment.strip(2))} {}

void Executor::begin(Execution& call) {
    members_.require_healthy();
    const Plan& plan = *call.plan;
    if (call.in.size() != plan.pieces_in || call.out.size() != plan.pieces_out) {
        throw Error(Fault::invalid, "the call does not have as many pieces as its plan");
    }
    if (plan.rank != members_.rank() || plan.ranks != members_.ranks() || call.block_bytes == 0) {
        throw Error(Fault::invalid, "the plan is not for this rank of this group");
    }
    const size_t element = size_of(call.args.dtype);
    uint64_t longest = part_bytes(call.longest_bytes, plan.parts, element), bytes = 0;
    for (const auto* pieces : {&call.in, &call.out}) {
        uint64_t sum = 0;
        for (const Piece& p : *pieces) {
            longest = std::max(longest, part_bytes(p.bytes, plan.parts, element));
            sum += p.bytes;
        }
        bytes = std::max(bytes, sum);
    }
    call.blocks = std::max<uint64_t>(1, (longest + call.block_bytes - 1) / call.block_bytes);
    call.slot_bytes = std::min(call.block_bytes, (longest + kLine - 1) / kLine * kLine);
    // Also the slots of the peers, for they are read here.
    const uint64_t most = *std::max_element(plan.slots.begin(), plan.slots.end());
    call.lane = lane_for(most * call.slot_bytes);
    scratch_.resize(std::max<size_t>(scratch_.size(), plan.scratch * call.block_bytes));
    call.seq = calls_.load(std::memory_order_relaxed) + 1;
    calls_.store(call.seq, std::memory_order_relaxed);
    agreement_.enter(call.seq, call.args, call.hash);
    call.traffic = {bytes, plan.copies_only, plan.one_writer};
}

Lane* Executor::lane_for(uint64_t bytes) {
    const auto fits = [bytes](const Lane& lane) { return bytes <= lane.area_bytes(); };
    const auto found = std::find_if(lanes_.begin(), lanes_.end(), fits);
    if (found == lanes_.end())
        throw Error(Fault::invalid, "the plan needs more staging than the group has");
    return found;
}

// The header becomes visible with the first thing that a peer could wait for, and before this rank
// waits for anything, so that the polled line moves once.
void Executor::announce(Execution& call) noexcept {
    call.announced = true;
    agreement_.announce(call.seq, call.hash);
}

bool Executor::advance(Execution& call, Deadline& deadline, const Interrupted& interrupted,
                       double limit_s) {
    if (call.seq == 0) begin(call);
    try {
        return carry_on({call, deadline, interrupted, limit_s});
    } catch (const std::exception& error) {
        abandon(call, error.what());
        throw;
    }
}

void Executor::abandon(const Execution& call, const char* why) {
    if (call.seq == 0) return;
    members_.record(Fault::aborted, "rank " + std::to_string(members_.rank()) + " gave up call #" +
                                        std::to_string(call.seq) + ": " + why);
}

bool Executor::carry_on(Wait wait) {
    Execution& call = wait.call;
    const Plan& plan = *call.plan;
    while (call.block < call.blocks) {
        if (!run_block(wait)) return false;
        base_ += plan.stages;
        call.lane->end(base_);
        ++call.block;
        call.record = 0;
    }
    return verify_all(wait);
}

bool Executor::run_block(Wait& wait) {
    Execution& call = wait.call;
    const Plan& plan = *call.plan;
    if (call.record == 0 && is_large(call)) choose_stores(call);
    if (call.record == 0 && plan.slots[plan.rank] > 0 && !reuse_slots(wait)) return false;
    const size_t end = plan.records.size();
    while (call.record < end) {
        const Record& r = plan.records[call.record];
        switch (r.action) {
            case Action::copy:
                copy(call, r);
                break;
            case Action::reduce:
                reduce(call, &r);
                call.record += r.sources;
                break;
            case Action::arg:
                break;
            case Action::wait:
                if (!wait_progress(wait, r.peer, base_ + r.value)) return false;
                break;
            case Action::post:
                post(call, base_ + r.value);
                break;
        }
        ++call.record;
    }
    return true;
}

void Executor::choose_stores(Execution& call) noexcept {
    const uint64_t ranks = members_.ranks();
    if (ranks > 1 && StoreRule::asks(call.policy, call.traffic)) {  // a peer after the other
        const uint64_t step = 1 + call.block % (ranks - 1);
        const auto peer = static_cast<uint32_t>((members_.rank() + step) % ranks);
        distance_.look(peer, segment_.rank(peer));
    }
    call.stores = stores_.choose(call.policy, call.traffic, distance_.far());
}

void Executor::post(Execution& call, uint64_t progress) noexcept {
    if (!call.announced) announce(call);
    own_.progress.store(progress, std::memory_order_release);
    ring(own_.bell, fence());
    if (is_large(call)) Distance::light(own_, progress);
}

// The area of this block held the block `depth` ago: all ranks must be past that one. It may have
// belonged to another call with other readers, hence all.
bool Executor::reuse_slots(Wait& wait) {
    const uint64_t target = wait.call.lane->reusable_at();
    for (uint32_t peer = 0; peer < members_.ranks(); ++peer) {
        if (peer == members_.rank()) continue;
        const auto& progress = segment_.rank(peer).progress;
        const auto ready = [&] { return progress.load(std::memory_order_acquire) >= target; };
        if (!wait_for(wait, peer, ready)) return false;
    }
    return true;
}

bool Executor::wait_progress(Wait& wait, uint32_t peer, uint64_t target) {
    const auto& progress = segment_.rank(peer).progress;
    const auto ready = [&] { return progress.load(std::memory_order_acquire) >= target; };
    if (!wait_for(wait, peer, ready)) return false;
    // Before anything is read from its slots: the header is on the line that was just looked at.
    static_cast<void>(agreement_.verify(peer, wait.call.seq, wait.call.hash));
    return true;
}

// No rank returns before it has seen every peer enter this very call: a barrier is nothing else.
// One exception: a call equal to the one before, which this rank could finish alone, need not hold
// it up (a root that broadcasts in a loop); what is owed is verified with a later call.
bool Executor::verify_all(Wait& wait) {
    Execution& call = wait.call;
    if (!call.announced) {
        announce(call);
        ring(own_.bell, fence());
    }
    const bool may_owe = call.hash == last_hash_ && call.args.root >= 0;
    for (; call.verified < members_.ranks(); ++call.verified) {
        const uint32_t peer = call.verified;
        if (peer == members_.rank()) continue;
        const auto ready = [&] { return agreement_.verify(peer, call.seq, call.hash); };
        if (!ready() && !may_owe && !wait_for(wait, peer, ready)) return false;
    }
    last_hash_ = call.hash;
    return true;
}

template <class Ready>
bool Executor::wait_for(Wait& wait, uint32_t peer, Ready ready) {
    if (ready()) return true;
    if (!wait.call.announced) {
        announce(wait.call);
        ring(own_.bell, fence());
    }
    return waiter_.wait(
        segment_.rank(peer).bell, ready, [&] { agreement_.inspect(peer, wait.call.seq); },
        [&] { return agreement_.late(wait.call.seq); }, wait.deadline, wait.interrupted,
        wait.limit_s);
}

std::byte* Executor::resolve(const Execution& call, const Ref& ref) const noexcept {
    switch (ref.space) {
        case Space::slot:
            return call.lane->area(ref.rank) + ref.index * call.slot_bytes;
        case Space::tmp:
            return const_cast<std::byte*>(scratch_.data()) + ref.index * call.block_bytes;
        case Space::in:
        case Space::out:
            break;
    }
    const Piece& piece = ref.space == Space::in ? call.in[ref.index] : call.out[ref.index];
    const uint64_t part = part_bytes(piece.bytes, call.plan->parts, size_of(call.args.dtype));
    return piece.data + ref.part * part + call.block * call.block_bytes;
}

// Bytes of this block in the part that `ref` names.
uint64_t Executor::length_of(const Execution& call, const Ref& ref) const noexcept {
    const Piece& piece = ref.space == Space::in ? call.in[ref.index] : call.out[ref.index];
    const uint64_t part = part_bytes(piece.bytes, call.plan->parts, size_of(call.args.dtype));
    const uint64_t begin = ref.part * part + call.block * call.block_bytes;
    const uint64_t end = std::min({(ref.part + 1) * part, piece.bytes, begin + call.block_bytes});
    return begin < end ? end - begin : 0;
}

void Executor::copy(const Execution& call, const Record& r) {
    const uint64_t bytes = length_of(call, r.length);
    if (bytes == 0) return;
    std::byte* dst = resolve(call, r.dst);
    const std::byte* src = resolve(call, r.src);
    if (r.flags & kHasSecond) {
        kernels::copy2(dst, resolve(call, r.dst2), src, bytes, store_for(call, r.dst),
                       store_for(call, r.dst2));
    } else if (dst != src) {
        kernels::copy(dst, src, bytes, store_for(call, r.dst));
    }
}

void Executor::reduce(const Execution& call, const Record* r) {
    const uint64_t bytes = length_of(call, r->length);
    if (bytes == 0) return;
    std::array<const void*, kMostSources> sources;
    for (size_t k = 0; k < r->sources; ++k) sources[k] = resolve(call, r[k + 1].src);
    const bool second = r->flags & kHasSecond;
    const bool average = call.args.reduction == ReduceOp::avg && (r->flags & kFinal);
    const auto operation =
        call.args.reduction == ReduceOp::avg ? ReduceOp::sum : call.args.reduction;
    kernels::reduce(call.args.dtype, operation, resolve(call, r->dst),
                    second ? resolve(call, r->dst2) : nullptr, sources.data(), r->sources,
                    bytes / size_of(call.args.dtype), average ? members_.ranks() : 0,
                    store_for(call, r->dst),
                    second ? store_for(call, r->dst2) : kernels::Store::cached);
}

}  // namespace unisono
