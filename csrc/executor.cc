#include "executor.h"

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <utility>

namespace unisono {
namespace {

constexpr double kNapWhileSending_s = 300e-6;
constexpr double kAnxious_s = 0.1;
constexpr Patience kPatienceAway{0, 4};  // each look is a system call
constexpr uint64_t kBorrowedBytes = 256 << 10;  // of all operands at a time: less than a core's cache
constexpr uint64_t kLeastBorrowedBytes = 16 << 10;  // of each: a look there is a system call

}  // namespace

uint64_t part_bytes(uint64_t piece_bytes, uint32_t parts, size_t element_bytes) noexcept {
    if (parts == 1) return piece_bytes;
    const uint64_t count = piece_bytes / element_bytes;
    const uint64_t unit = std::max<uint64_t>(1, kLine / element_bytes);
    const uint64_t each = (count + parts - 1) / parts;
    return (each + unit - 1) / unit * unit * element_bytes;
}

Executor::Executor(View& view, Membership& members, Waiter waiter, StoreRule stores,
                   Courier* courier)
    : view_(view),
      members_(members),
      courier_(courier),
      waiter_(waiter),
      away_(members, kPatienceAway),
      stores_(stores),
      distance_(members.ranks()),
      own_(view.own()),
      agreement_(view, members),
      lanes_{Lane(view, 0), Lane(view, 1), Lane(view, 2)},
      loans_(view, members) {}

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
    if (plan.loans_only) call.slot_bytes = kLine;
    if ((plan.lends || plan.borrows) && longest > 0 && call.slot_bytes < sizeof(std::byte*))
        throw Error(Fault::invalid, "the call's blocks are too small to lend memory");
    // Also the slots of the peers, for they are read here.
    const uint64_t most = *std::max_element(plan.slots.begin(), plan.slots.end());
    call.lane = lane_for(most * call.slot_bytes);
    // Every block under way must have an area, and a round at which it is.
    call.lead = static_cast<uint32_t>(std::min(
        {uint64_t{call.lead}, call.lane->depth() - 1, call.blocks - 1, uint64_t{plan.rounds} - 1}));
    if (courier_ && call.lead > 0) courier_->answer_all(call.lane->place(0).strip);
    scratch_.resize(
        std::max<size_t>(scratch_.size(), plan.scratch * (call.lead + 1) * call.block_bytes));
    call.seq = next_number();
    agreement_.enter(call.seq, call.args, call.hash);
    call.traffic = {bytes, plan.copies_only, plan.one_writer};
}

uint64_t Executor::next_number() noexcept {
    const uint64_t number = calls_.load(std::memory_order_relaxed) + 1;
    calls_.store(number, std::memory_order_relaxed);
    return number;
}

// Those who wait for this rank in the call of this number find that it refused, and why. Where all
// ranks refuse, none waits: their numbers stay in step, and no harm was done.
void Executor::refuse(Execution& call) {
    members_.require_healthy();
    call.seq = next_number();
    agreement_.refuse(call.seq, *call.refusal);
    agreement_.announce(call.seq, kRefusedHash);
    last_hash_ = kRefusedHash;
    ring(own_.bell, fence());
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
    if (call.refusal != nullptr) {
        refuse(call);
        return true;
    }
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
    while (call.step < call.blocks + call.lead) {
        if (!run_step(wait)) return false;
        base_ += plan.stages;
        if (call.step >= call.lead) {
            if (courier_) courier_->end_block(plan, call.lane->place(0), call.lead, base_);
            call.lane->end(base_);
        }
        ++call.step;
        call.record = 0;
    }
    return take_back(wait) && verify_all(wait) && hand_over(wait);
}

bool Executor::run_step(Wait& wait) {
    Execution& call = wait.call;
    const Plan& plan = *call.plan;
    if (call.record == 0) {
        call.block = call.step;  // the one that begins
        if (is_large(call)) choose_stores(call);
        if (call.step < call.blocks && plan.slots[plan.rank] > 0 && !reuse_slots(wait))
            return false;
    }
    const size_t end = plan.records.size();
    while (call.record < end) {
        const Record& r = plan.records[call.record];
        const uint64_t behind = call.lead - call.lead_of(r.round);
        if (behind <= call.step && call.step - behind < call.blocks) {
            call.block = call.step - behind;
            if (!run_record(wait, &r)) return false;
        }
        call.record += 1 + (r.action == Action::reduce ? r.sources : 0);
    }
    return true;
}

bool Executor::run_record(Wait& wait, const Record* record) {
    switch (record->action) {
        case Action::copy:
            copy(wait.call, *record);
            return true;
        case Action::reduce:
            reduce(wait.call, record);
            return true;
        case Action::arg:
            return true;
        case Action::lend:
            if (length_of(wait.call, record->length) > 0)
                lend(wait.call, record->dst, record->src);
            return true;
        case Action::wait:
            return wait_progress(wait, *record);
        case Action::post:
            post(wait.call, record->value);
            return true;
    }
    return true;
}

void Executor::choose_stores(Execution& call) noexcept {
    const auto& here = view_.here();
    if (here.size() > 1 && StoreRule::asks(call.policy, call.traffic)) {  // a peer after the other
        const uint64_t step = 1 + call.block % (here.size() - 1);
        const uint32_t peer = here[(view_.place(members_.rank()) + step) % here.size()];
        distance_.look(peer, view_.control(peer));
    }
    call.stores = stores_.choose(call.policy, call.traffic, distance_.far());
}

void Executor::post(Execution& call, uint32_t value) {
    if (!call.announced) announce(call);
    const uint64_t progress = base_ + value;
    own_.progress.store(progress, std::memory_order_release);
    ring(own_.bell, fence());
    if (is_large(call)) Distance::light(own_, progress);
    if (courier_) show(call, value);
}

// To ranks of other hosts, what they read of this post, each in one go.
void Executor::show(const Execution& call, uint32_t value) {
    const Place place = call.lane->place(call.ahead());
    const std::byte* areas = view_.areas(members_.rank(), place.strip);
    const auto readers = call.plan->readers_of(value);
    for (auto it = readers.begin(); it != readers.end();) {
        const uint32_t peer = it->rank;
        loads_.clear();
        for (; it != readers.end() && it->rank == peer; ++it) {
            const uint64_t bytes = length_of(call, call.plan->slot_lengths[it->slot]);
            const std::byte* slot =
                call.lane->area(members_.rank(), call.ahead()) + it->slot * call.slot_bytes;
            if (bytes) loads_.push_back({static_cast<uint64_t>(slot - areas), slot, bytes});
        }
        if (!view_.local(peer)) courier_->show(peer, place, loads_);
    }
}

// The area of this block held the block `depth` ago: all ranks must be past that one. It may have
// belonged to another call with other readers, hence all.
bool Executor::reuse_slots(Wait& wait) {
    const uint64_t ahead = wait.call.ahead();
    const uint64_t target = wait.call.lane->reusable_at(ahead);
    for (const uint32_t peer : view_.here()) {
        if (peer == members_.rank()) continue;
        const auto& progress = view_.control(peer).progress;
        const auto ready = [&] { return progress.load(std::memory_order_acquire) >= target; };
        if (!wait_for(wait, peer, ready)) return false;
    }
    if (!courier_) return true;
    const Place place = wait.call.lane->place(ahead);
    while (const auto peer = courier_->debtor(place)) {  // of other hosts, those who read it
        const auto ready = [&] { return courier_->answered(*peer, place); };
        if (!wait_for(wait, *peer, ready)) return false;
    }
    return true;
}

bool Executor::wait_progress(Wait& wait, const Record& record) {
    const uint32_t peer = record.peer;
    // The peer did it so many steps earlier.
    const uint64_t steps = wait.call.lead_of(record.posted) - wait.call.lead_of(record.round);
    const uint64_t target = base_ + record.value - steps * wait.call.plan->stages;
    const auto& progress = view_.control(peer).progress;
    const auto ready = [&] { return progress.load(std::memory_order_acquire) >= target; };
    if (!wait_for(wait, peer, ready)) return false;
    // Before anything is read from its slots: the header is on the line that was just looked at.
    static_cast<void>(agreement_.verify(peer, wait.call.seq, wait.call.hash));
    return true;
}

// No rank returns before it has seen every peer of its host enter this very call: there a barrier
// is nothing else. Of the other hosts it has seen those whose slots it read. One exception: a call
// equal to the one before, which this rank could finish alone, need not hold it up (a root that
// broadcasts in a loop); what is owed is verified with a later call.
bool Executor::verify_all(Wait& wait) {
    Execution& call = wait.call;
    if (!call.announced) {
        announce(call);
        ring(own_.bell, fence());
    }
    const bool may_owe = call.hash == last_hash_ && call.args.root >= 0;
    for (; call.verified < members_.ranks(); ++call.verified) {
        const uint32_t peer = call.verified;
        if (peer == members_.rank() || !view_.local(peer)) continue;
        const auto ready = [&] { return agreement_.verify(peer, call.seq, call.hash); };
        if (!ready() && !may_owe && !wait_for(wait, peer, ready)) return false;
    }
    last_hash_ = call.hash;
    return true;
}

// Nobody may be reading what this rank has lent once its caller may change it. And what it has read
// is right only if the lender had not given the call up before.
bool Executor::take_back(Wait& wait) {
    const Plan& plan = *wait.call.plan;
    if (plan.lends) {
        for (; wait.call.returned < plan.readers_of_any.size(); ++wait.call.returned) {
            const uint32_t peer = plan.readers_of_any[wait.call.returned];
            const auto& progress = view_.control(peer).progress;
            const auto ready = [&] { return progress.load(std::memory_order_acquire) >= base_; };
            if (!wait_for(wait, peer, ready)) return false;
        }
    }
    if (plan.borrows) {
        std::atomic_thread_fence(std::memory_order_acquire);
        members_.require_healthy();
    }
    return true;
}

template <class Ready>
bool Executor::wait_for(Wait& wait, uint32_t peer, Ready ready) {
    if (ready()) return true;
    if (!wait.call.announced) {
        announce(wait.call);
        ring(own_.bell, fence());
    }
    return view_.local(peer) ? wait_here(wait, peer, ready) : wait_away(wait, peer, ready);
}

template <class Ready>
bool Executor::wait_here(Wait& wait, uint32_t peer, Ready ready) {
    Bell& bell = view_.control(peer).bell;
    const auto rest = [&](auto&& awake, double seconds) {
        if (!courier_ || !courier_->wire().needs_looks()) return sleep_on(bell, awake, seconds);
        courier_->wire().poll();  // what other hosts wait for must not wait for this
        const double nap_s = std::min(seconds, kNapWhileSending_s);
        const Woken woken = sleep_on(bell, awake, nap_s);
        return woken == Woken::timed_out && nap_s < seconds ? Woken::rung : woken;
    };
    return waiter_.wait(
        rest, ready, [&] { look_around(wait, peer, agreement_.has_left(peer)); },
        [&] { return agreement_.late(wait.call.seq); }, wait.deadline, wait.interrupted,
        wait.limit_s);
}

template <class Ready>
bool Executor::wait_away(Wait& wait, uint32_t peer, Ready ready) {
    Wire& wire = courier_->wire();
    const auto brought = [&] {
        if (ready()) return true;
        wire.poll();
        return ready();
    };
    const auto rest = [&](auto&& awake, double seconds) {
        return wire.sleep(seconds, std::ref(awake));
    };
    const auto look = [&] {
        const bool left = agreement_.has_left(peer);
        if (left) wire.poll();  // the news of that came another way than what it had shown before
        look_around(wait, peer, left);
    };
    return away_.wait(
        rest, brought, look, [&] { return agreement_.late(wait.call.seq); }, wait.deadline,
        wait.interrupted, wait.limit_s);
}

// Throws if waiting for the peer is in vain. What ranks of other hosts have called, this rank hears
// only if it asks.
void Executor::look_around(Wait& wait, uint32_t peer, bool left) {
    agreement_.inspect(peer, wait.call.seq, left);
    if (courier_ && wait.deadline.elapsed_s() > kAnxious_s) members_.events().raise(Event::anxious);
}

// Who has left without ever having been connected takes nothing of what it should have read.
void Executor::look_for_readers(const Execution& call) {
    members_.require_healthy();
    for (const uint32_t peer : call.plan->readers_of_any) {
        if (!view_.local(peer) && !courier_->wire().reached(peer))
            agreement_.inspect(peer, call.seq, agreement_.has_left(peer));
    }
}

// What this rank has shown must have left it before it goes about other things: nobody moves the
// wire then.
bool Executor::hand_over(Wait& wait) {
    if (!courier_ || courier_->wire().idle()) return true;
    Wire& wire = courier_->wire();
    const auto gone = [&] {
        if (!wire.idle()) wire.poll();
        return wire.idle();
    };
    const auto rest = [&](auto&& awake, double seconds) {
        return wire.sleep(seconds, std::ref(awake));
    };
    return away_.wait(
        rest, gone, [&] { look_for_readers(wait.call); },
        [&] { return agreement_.late(wait.call.seq) + "; not all take what this rank sends"; },
        wait.deadline, wait.interrupted, wait.limit_s);
}

std::byte* Executor::resolve(const Execution& call, const Ref& ref) const noexcept {
    switch (ref.space) {
        case Space::slot:
            return call.lane->area(ref.rank, call.ahead()) + ref.index * call.slot_bytes;
        case Space::tmp: {  // of each block under way
            const uint64_t at = ref.index * (call.lead + 1) + call.block % (call.lead + 1);
            return const_cast<std::byte*>(scratch_.data()) + at * call.block_bytes;
        }
        case Space::lent: {
            const std::byte* slot =
                call.lane->area(ref.rank, call.ahead()) + ref.index * call.slot_bytes;
            return const_cast<std::byte*>(shown_loan(slot));
        }
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
    if (is_foreign(r.src)) {
        loans_.read(r.src.rank, dst, src, bytes);
        if (r.flags & kHasSecond)
            kernels::copy(resolve(call, r.dst2), dst, bytes, store_for(call, r.dst2));
    } else if (r.flags & kHasSecond) {
        kernels::copy2(dst, resolve(call, r.dst2), src, bytes, store_for(call, r.dst),
                       store_for(call, r.dst2));
    } else if (dst != src) {
        kernels::copy(dst, src, bytes, store_for(call, r.dst));
    }
    if (r.flags & kLends) lend(call, r.dst2, r.dst);
}

void Executor::lend(const Execution& call, const Ref& slot, const Ref& memory) const noexcept {
    show_loan(resolve(call, slot), resolve(call, memory));
}

// Of what other processes lend, as much at a time as stays in the cache.
void Executor::reduce(const Execution& call, const Record* r) {
    const uint64_t bytes = length_of(call, r->length), element = size_of(call.args.dtype);
    const auto foreign = static_cast<uint64_t>(std::count_if(
        r + 1, r + 1 + r->sources, [this](const Record& arg) { return is_foreign(arg.src); }));
    const uint64_t most =
        foreign == 0 ? bytes
                     : std::max(kBorrowedBytes / foreign, kLeastBorrowedBytes) / element * element;
    if (borrowed_.size() < foreign * most) borrowed_.resize(foreign * most);
    for (uint64_t at = 0; at < bytes; at += most)
        reduce_some(call, r, at, std::min(most, bytes - at));
    if (r->flags & kLends) lend(call, r->dst2, r->dst);
}

void Executor::reduce_some(const Execution& call, const Record* r, uint64_t at, uint64_t bytes) {
    std::array<const void*, kMostSources> sources;
    std::byte* borrowed = borrowed_.data();
    for (size_t k = 0; k < r->sources; ++k) {
        const Ref& ref = r[k + 1].src;
        const std::byte* source = resolve(call, ref) + at;
        if (is_foreign(ref)) {
            loans_.read(ref.rank, borrowed, source, bytes);
            source = std::exchange(borrowed, borrowed + bytes);
        }
        sources[k] = source;
    }
    const bool second = r->flags & kHasSecond;
    const bool average = call.args.reduction == ReduceOp::avg && (r->flags & kFinal);
    const auto operation =
        call.args.reduction == ReduceOp::avg ? ReduceOp::sum : call.args.reduction;
    kernels::reduce(call.args.dtype, operation, resolve(call, r->dst) + at,
                    second ? resolve(call, r->dst2) + at : nullptr, sources.data(), r->sources,
                    bytes / size_of(call.args.dtype), average ? members_.ranks() : 0,
                    store_for(call, r->dst),
                    second ? store_for(call, r->dst2) : kernels::Store::cached);
}

}  // namespace unisono
