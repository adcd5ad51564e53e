#include "execution/executor.h"

#include <algorithm>
#include <string>

namespace unisono {
namespace {

// Each look is a system call. What is small comes within the time that falling asleep and waking
// takes; what is large takes longer, and the cores have it to bring.
constexpr Patience kPatienceAway{0, 4}, kPatienceAwaySmall{0, 100};

// Whether results go where this rank's input was.
bool is_in_place(const Execution& call) noexcept {
    const auto same = [](const Piece& in, const Piece& out) { return in.data == out.data; };
    return std::equal(call.in.begin(), call.in.begin() + std::min(call.in.size(), call.out.size()),
                      call.out.begin(), same);
}

[[noreturn]] void invalid(const Execution& call, const std::string& why) {
    throw Error(Fault::invalid, std::string(name_of(call.args.op)) + ": " + why);
}

std::string count_of(size_t in, size_t out) {
    return std::to_string(in) + " pieces of input and " + std::to_string(out) + " of output";
}

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
      away_small_(members, kPatienceAwaySmall),
      stores_(stores),
      distance_(members.ranks()),
      own_(view.own()),
      passed_(members.ranks(), 0),
      agreement_(view, members),
      lanes_{Lane(view, 0), Lane(view, 1), Lane(view, 2)},
      loans_(view, members) {}

// Whatever goes wrong before the call has its number: the number is taken all the same, for the
// numbers of the other ranks go on, and those who make the call find the reason beside it.
void Executor::begin(Execution& call) {
    members_.require_healthy();
    try {
        prepare(call);
    } catch (const std::exception& error) {
        refuse(error.what());
        throw;
    }
    call.seq = next_number();
    agreement_.enter(call.seq, call.args, call.hash);
    if (courier_ && call.lead > 0) courier_->answer_all(call.lane->place(0).strip);
}

// Nobody sees anything of it yet.
void Executor::prepare(Execution& call) {
    const Plan& plan = *call.plan;
    if (call.in.size() != plan.pieces_in || call.out.size() != plan.pieces_out) {
        invalid(call, "the call has " + count_of(call.in.size(), call.out.size()) +
                          ", its plan is for " + count_of(plan.pieces_in, plan.pieces_out));
    }
    if (plan.rank != members_.rank() || plan.ranks != members_.ranks()) {
        invalid(call, "the plan is for rank " + std::to_string(plan.rank) + " of " +
                          std::to_string(plan.ranks) + ", this is rank " +
                          std::to_string(members_.rank()) + " of " +
                          std::to_string(members_.ranks()));
    }
    if (call.block_bytes == 0) invalid(call, "a block has at least one element, got 0 bytes");
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
        invalid(call, "blocks of " + std::to_string(call.block_bytes) +
                          " bytes are too small to lend memory: they hold an address of " +
                          std::to_string(sizeof(std::byte*)) + " bytes");
    // Also the slots of the peers, for they are read here.
    const uint64_t most = *std::max_element(plan.slots.begin(), plan.slots.end());
    call.lane = lane_for(call, most * call.slot_bytes);
    // Every block under way must have an area, and a round at which it is.
    call.lead = static_cast<uint32_t>(std::min(
        {uint64_t{call.lead}, call.lane->depth() - 1, call.blocks - 1, uint64_t{plan.rounds} - 1}));
    reserve_scratch(call);
    call.traffic = {bytes, !plan.copies_only && is_in_place(call)};
}

void Executor::reserve_scratch(const Execution& call) {
    const uint64_t bytes = uint64_t{call.plan->scratch} * (call.lead + 1) * call.block_bytes;
    if (bytes <= scratch_.size()) return;
    try {
        scratch_.resize(bytes);
    } catch (const std::exception&) {  // too little memory, or more than there can be
        throw Error(Fault::system, std::string(name_of(call.args.op)) + ": no memory for " +
                                       std::to_string(bytes) + " bytes of intermediate results");
    }
}

uint64_t Executor::next_number() noexcept {
    const uint64_t number = calls_.load(std::memory_order_relaxed) + 1;
    calls_.store(number, std::memory_order_relaxed);
    return number;
}

// Those who wait for this rank in the call of this number find that it refused, and why. Where all
// ranks refuse, none waits: their numbers stay in step, and no harm was done.
void Executor::refuse(std::string_view reason) noexcept {
    const uint64_t seq = next_number();
    agreement_.refuse(seq, reason);
    agreement_.announce(seq, kRefusedHash);
    last_hash_ = kRefusedHash;
    ring(own_.bell, fence());
}

Lane* Executor::lane_for(const Execution& call, uint64_t bytes) {
    const auto fits = [bytes](const Lane& lane) { return bytes <= lane.area_bytes(); };
    const auto found = std::find_if(lanes_.begin(), lanes_.end(), fits);
    if (found == lanes_.end()) {
        invalid(call, "the plan needs " + std::to_string(bytes) +
                          " bytes of staging for a block, the group has " +
                          std::to_string(lanes_.back().area_bytes()) +
                          ": take smaller blocks, or raise UNISONO_STAGING_BYTES");
    }
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
        members_.require_healthy();
        refuse(*call.refusal);
        return true;
    }
    try {
        if (call.seq == 0) begin(call);
        return carry_on({call, deadline, interrupted, limit_s});
    } catch (const std::exception& error) {
        abandon(call, error.what());
        throw;
    }
}

void Executor::abandon(const Execution& call, const char* why) noexcept {
    if (call.seq == 0) return;
    members_.record_made(Fault::aborted, [&] {
        return "rank " + std::to_string(members_.rank()) + " gave up call #" +
               std::to_string(call.seq) + ": " + why;
    });
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
            if (length_of(wait.call, record->length) > 0) lend(wait.call, record->dst, record->src);
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

}  // namespace unisono
