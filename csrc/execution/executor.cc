#include "execution/executor.h"

#include <algorithm>
#include <string>

namespace unisono {
namespace {

// Number of yields before a sleep in a wait for a rank on another host. Each poll is a system call.
// A small message arrives within the time of a sleep and a wake-up. A large message takes longer,
// and the transport needs the cores.
constexpr SpinPolicy kRemoteSpin{0, 4}, kSmallRemoteSpin{0, 100};

// Returns true if the results overwrite this rank's input.
bool is_in_place(const Execution& call) noexcept {
    const auto same = [](const Piece& in, const Piece& out) { return in.data == out.data; };
    return std::equal(call.in.begin(), call.in.begin() + std::min(call.in.size(), call.out.size()),
                      call.out.begin(), same);
}

// Pieces of 2 KiB and more use the long ring: it is faster for them between ranks of one host.
StagingRing small_ring(const View& view) {
    return StagingRing::with_buffers(view, 1, view.away().empty() ? 2 : 1);
}

StagingRing large_ring(const View& view) {
    return view.away().empty() ? StagingRing::of_any_length(view, 2)
                               : StagingRing::with_buffers(view, 2);
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
                   OperationCounters& counters, SharedHeap& heap, RemoteSlots* remote_slots)
    : view_(view),
      members_(members),
      counters_(counters),
      remote_slots_(remote_slots),
      waiter_(waiter),
      remote_waiter_(members, kRemoteSpin),
      small_remote_waiter_(members, kSmallRemoteSpin),
      stores_(stores),
      distance_(members.ranks()),
      own_(view.own()),
      core_sharing_(own_),
      passed_(members.ranks(), 0),
      call_check_(view, members),
      staging_rings_{StagingRing::with_buffers(view, 0), small_ring(view), large_ring(view)},
      heap_(heap),
      cross_memory_(view, members, heap) {}

// Starts a call. A call that fails before it has a number still takes one, because the numbers of
// the other ranks advance. Ranks that make the call find the reason in the history.
void Executor::begin(Execution& call) {
    members_.require_healthy();
    try {
        prepare(call);
    } catch (const std::exception& error) {
        refuse(error.what());
        throw;
    }
    call.seq = next_number();
    call.measures_distance = view_.here().size() > 1 &&
                             stores_.needs_distance(call.policy, call.traffic) &&
                             distance_turns_.take(call.slot_bytes);
    call.staging->begin(call.staged_bytes, call.lead, call.blocks);
    call_check_.enter(call.seq, call.args, call.hash);
    core_sharing_.enter(call.longest_bytes);
    if (remote_slots_ && call.lead > 0)
        remote_slots_->acknowledge_all(call.staging->place(0).size_class);
}

// Uses the form for shared heaps if all arrays that peers access in it lie in this rank's heap.
// Ranks that choose differently find different fingerprints.
void Executor::choose_form(Execution& call) const {
    const auto lie_in_heap = [this](const Pieces& pieces) {
        return std::all_of(pieces.begin(), pieces.end(),
                           [this](const Piece& p) { return heap_.contains(p.data, p.bytes); });
    };
    const HeapForm& form = *call.heap_form;
    const bool writes_back = form.plan->writes_back;
    if (form.in && !writes_back && !lie_in_heap(call.in)) return;
    if ((form.out || writes_back) && !lie_in_heap(call.out)) return;
    if (writes_back && !is_in_place(call)) {  // peers replace the contributions by the results
        const Piece &from = *call.in.begin(), &to = *call.out.begin();
        if (call.in.size() != 1 || call.out.size() != 1 || from.bytes != to.bytes) return;
        kernels::copy(to.data, from.data, from.bytes);
        call.in = call.out;
    }
    call.plan = form.plan;
    call.hash = form.hash;
    call.block_bytes = form.block_bytes;
    call.args.in_heaps = true;
}

// Checks the call and computes its layout. Publishes nothing to the peers yet.
void Executor::prepare(Execution& call) {
    if (call.heap_form) choose_form(call);
    const Plan& plan = *call.plan;
    if (call.in.size() != plan.pieces_in || call.out.size() != plan.pieces_out) {
        invalid(call, "the call has " + count_of(call.in.size(), call.out.size()) +
                          ", but its plan is for " + count_of(plan.pieces_in, plan.pieces_out));
    }
    if (plan.rank != members_.rank() || plan.ranks != members_.ranks()) {
        invalid(call, "the plan is for rank " + std::to_string(plan.rank) + " of " +
                          std::to_string(plan.ranks) + ", but this is rank " +
                          std::to_string(members_.rank()) + " of " +
                          std::to_string(members_.ranks()));
    }
    if (plan.writes_back && !call.args.in_heaps)
        invalid(call, "the plan writes to the heaps of other ranks, but the arrays are elsewhere");
    if (call.block_bytes == 0)
        invalid(call, "expected blocks of at least one element, got 0 bytes");
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
    if (plan.addresses_only) call.slot_bytes = kLine;
    if ((plan.shares_memory || plan.reads_in_place) && longest > 0 &&
        call.slot_bytes < sizeof(std::byte*))
        invalid(call, "blocks of " + std::to_string(call.block_bytes) +
                          " bytes are too small for single copy: a slot holds an address of " +
                          std::to_string(sizeof(std::byte*)) + " bytes");
    // The largest number of slots of any rank. The number of this rank's own slots is not enough,
    // because this rank also reads the slots of peers.
    const uint64_t most = *std::max_element(plan.slots.begin(), plan.slots.end());
    call.staged_bytes = most * call.slot_bytes;
    call.staging = staging_for(call, call.staged_bytes);
    // Limits the lead. Every block in flight needs a staging buffer and a round of its own, and a
    // call cannot have more blocks in flight than it has blocks.
    call.lead = static_cast<uint32_t>(std::min({uint64_t{call.lead}, call.staging->depth() - 1,
                                                call.blocks - 1, uint64_t{plan.rounds} - 1}));
    reserve_scratch(call);
    call.traffic = {bytes, call.slot_bytes, !plan.copies_only && is_in_place(call)};
}

void Executor::reserve_scratch(const Execution& call) {
    const uint64_t bytes = uint64_t{call.plan->scratch} * (call.lead + 1) * call.block_bytes;
    if (bytes <= scratch_.size()) return;
    try {
        scratch_.resize(bytes);
    } catch (const std::exception&) {  // no memory, or more than a vector can hold
        throw Error(Fault::system, std::string(name_of(call.args.op)) + ": no memory for " +
                                       std::to_string(bytes) + " bytes of intermediate results");
    }
}

uint64_t Executor::next_number() noexcept {
    const uint64_t number = calls_.load(std::memory_order_relaxed) + 1;
    calls_.store(number, std::memory_order_relaxed);
    return number;
}

// Publishes a refusal. Ranks that wait for this rank in this call find the refusal and its reason.
// If all ranks refuse the call, no rank waits, their numbers stay equal, and the group remains
// usable.
void Executor::refuse(std::string_view reason) noexcept {
    const uint64_t seq = next_number();
    call_check_.refuse(seq, reason);
    call_check_.announce(seq, kRefusedHash);
    last_hash_ = kRefusedHash;
    ring(own_.doorbell, fence());
}

StagingRing* Executor::staging_for(const Execution& call, uint64_t bytes) {
    const auto fits = [bytes](const StagingRing& staging) {
        return bytes <= staging.buffer_bytes();
    };
    const auto found = std::find_if(staging_rings_.begin(), staging_rings_.end(), fits);
    if (found == staging_rings_.end()) {
        invalid(call, "the plan needs " + std::to_string(bytes) +
                          " bytes of staging for a block, but the group has " +
                          std::to_string(staging_rings_.back().buffer_bytes()) +
                          ": use smaller blocks, or raise UNISONO_STAGING_BYTES");
    }
    return found;
}

// Publishes the header. This happens together with the first post, and before this rank waits, so
// that the polled cache line moves to the peers only once.
void Executor::announce(Execution& call) noexcept {
    call.announced = true;
    call_check_.announce(call.seq, call.hash);
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
        if (!run_steps({call, deadline, interrupted, limit_s})) return false;
        counters_.add(call.volume);
        return true;
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
    // Peers that read the memory after this find the failure; see await_readers().
    if (call.args.in_heaps && call.plan->writes_back) {
        for (const Piece& piece : call.out) heap_.detach(piece.data, piece.bytes);
    }
    heap_.detach_exposed();
}

bool Executor::run_steps(Wait wait) {
    Execution& call = wait.call;
    const Plan& plan = *call.plan;
    while (call.step < call.blocks + call.lead) {
        if (!run_step(wait)) return false;
        base_ += plan.stages;
        if (call.step >= call.lead) {
            if (remote_slots_)
                remote_slots_->end_block(plan, call.staging->place(0), call.lead, base_);
            call.staging->end(base_);
        }
        ++call.step;
        call.record = 0;
    }
    return await_readers(wait) && verify_all(wait) && flush_sends(wait);
}

bool Executor::run_step(Wait& wait) {
    Execution& call = wait.call;
    const Plan& plan = *call.plan;
    if (call.record == 0) {
        call.block = call.step;  // the block that starts in this step
        choose_stores(call);
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
        case Action::share:
            if (length_of(wait.call, record->length) > 0)
                share(wait.call, record->dst, record->src);
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
    if (call.measures_distance) {
        const uint64_t step = distance_turns_.step(call.block, here.size());
        const uint32_t peer = here[(view_.place(members_.rank()) + step) % here.size()];
        distance_.measure(peer, view_.control(peer));
    }
    call.stores = stores_.choose(call.policy, call.traffic, distance_.far());
}

void Executor::post(Execution& call, uint32_t value) {
    if (!call.announced) announce(call);
    const uint64_t progress = base_ + value;
    own_.progress.store(progress, std::memory_order_release);
    ring(own_.doorbell, fence());
    if (call.measures_distance) Distance::publish(own_, progress);
    if (remote_slots_) send_slots(call, value);
}

// Sends the slots of this post to their readers on other hosts, in one frame for each peer.
void Executor::send_slots(const Execution& call, uint32_t value) {
    const Place place = call.staging->place(call.ahead());
    const std::byte* buffers = view_.buffers(members_.rank(), place.size_class);
    const auto readers = call.plan->readers_of(value);
    // Slots may hold data that was read in a peer's memory; see await_readers(). Ranks of other
    // hosts do not see this host's failure, so what they receive must be valid.
    if (!readers.empty() && (call.args.in_heaps || call.plan->reads_in_place)) {
        std::atomic_thread_fence(std::memory_order_acquire);
        members_.require_healthy();
    }
    for (auto it = readers.begin(); it != readers.end();) {
        const uint32_t peer = it->rank;
        loads_.clear();
        for (; it != readers.end() && it->rank == peer; ++it) {
            const uint64_t bytes = length_of(call, call.plan->slot_lengths[it->slot]);
            const std::byte* slot =
                call.staging->buffer(members_.rank(), call.ahead()) + it->slot * call.slot_bytes;
            if (bytes) loads_.push_back({static_cast<uint64_t>(slot - buffers), slot, bytes});
        }
        if (!view_.local(peer)) remote_slots_->send_slots(peer, place, loads_);
    }
}

}  // namespace unisono
