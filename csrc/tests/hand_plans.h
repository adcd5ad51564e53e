// Hand-written plans, one per algorithm, for tests of the core without Python.
#pragma once

#include <memory>
#include <vector>

#include "execution/plan.h"

namespace unisono::hand {

inline Ref in(uint32_t piece, uint32_t part = 0) {
    return {Space::in, 0, 0, static_cast<uint16_t>(piece), static_cast<uint16_t>(part)};
}
inline Ref out(uint32_t piece, uint32_t part = 0) {
    return {Space::out, 0, 0, static_cast<uint16_t>(piece), static_cast<uint16_t>(part)};
}
inline Ref slot(uint32_t rank, uint32_t index) {
    return {Space::slot, 0, static_cast<uint16_t>(rank), static_cast<uint16_t>(index), 0};
}
inline Ref shared(uint32_t rank, uint32_t index) {
    return {Space::shared, 0, static_cast<uint16_t>(rank), static_cast<uint16_t>(index), 0};
}
inline Ref tmp(uint32_t index) {
    return {Space::tmp, 0, 0, static_cast<uint16_t>(index), 0};
}

class Writer {
  public:
    Writer& copy(Ref dst, Ref src, Ref length) {
        records_.push_back({Action::copy, 0, 0, 0, 0, 0, 0, dst, {}, src, length});
        return *this;
    }
    Writer& share(Ref slot, Ref memory, uint16_t flags = 0) {
        records_.push_back({Action::share, 0, 0, flags, 0, 0, 0, slot, {}, memory, memory});
        return *this;
    }
    Writer& reduce(Ref dst, const std::vector<Ref>& sources, Ref length, uint16_t flags,
                   Ref dst2 = {}) {
        const auto count = static_cast<uint16_t>(sources.size());
        records_.push_back({Action::reduce, count, 0, flags, 0, 0, 0, dst, dst2, {}, length});
        for (const Ref& source : sources)
            records_.push_back({Action::arg, 0, 0, 0, 0, 0, 0, {}, {}, source, length});
        return *this;
    }
    Writer& wait(uint32_t peer, uint32_t value) {
        records_.push_back(
            {Action::wait, 0, static_cast<uint16_t>(peer), 0, value, 0, 0, {}, {}, {}, {}});
        return *this;
    }
    Writer& post(uint32_t value) {
        records_.push_back({Action::post, 0, 0, 0, value, 0, 0, {}, {}, {}, {}});
        return *this;
    }
    std::shared_ptr<const Plan> plan(uint32_t rank, uint32_t ranks, uint32_t pieces_in,
                                     uint32_t pieces_out, uint32_t parts, uint32_t stages,
                                     std::vector<uint32_t> slots, uint32_t scratch = 0,
                                     bool addresses_only = false) const {
        return std::make_shared<const Plan>(
            std::as_bytes(std::span(records_)), std::as_bytes(std::span(readers_)), rank, ranks,
            pieces_in, pieces_out, parts, stages, 1, std::move(slots), scratch, addresses_only);
    }

    // Adds a reader: rank `rank` reads `slot`, which this rank publishes with its post `value`.
    Writer& read_by(uint32_t rank, uint32_t slot, uint32_t value) {
        readers_.push_back({value, static_cast<uint16_t>(slot), static_cast<uint16_t>(rank)});
        return *this;
    }

  private:
    std::vector<Record> records_;
    std::vector<Reader> readers_;
};

using Slots = std::vector<uint32_t>;

// Makes the plan of one rank and adds the readers of its slots, derived from the plans of all
// ranks. `make(r)` makes rank r's plan. Each reader has the number of the post for which it last
// waited before it read the slot.
template <class Make>
std::shared_ptr<const Plan> with_readers(uint32_t rank, uint32_t ranks, Make&& make) {
    std::vector<Reader> readers;
    for (uint32_t q = 0; q < ranks; ++q) {
        if (q == rank) continue;
        uint32_t shown = 0;
        const std::shared_ptr<const Plan> theirs = make(q);
        for (const Record& r : theirs->records) {
            if (r.action == Action::wait && r.peer == rank) shown = r.value;
            const bool reads = r.action == Action::copy || r.action == Action::arg;
            const bool foreign = r.src.space == Space::slot || r.src.space == Space::shared;
            if (reads && foreign && r.src.rank == rank)
                readers.push_back({shown, r.src.index, static_cast<uint16_t>(q)});
        }
    }
    const auto p = make(rank);
    return std::make_shared<const Plan>(std::as_bytes(std::span(p->records)),
                                        std::as_bytes(std::span(readers)), rank, ranks,
                                        p->pieces_in, p->pieces_out, p->parts, p->stages, p->rounds,
                                        p->slots, p->scratch, p->addresses_only);
}

// A plan in which every rank publishes its whole input to all ranks.
inline std::shared_ptr<const Plan> one_shot(uint32_t rank, uint32_t ranks) {
    Writer w;
    std::vector<Ref> sources;
    w.copy(slot(rank, 0), in(0), in(0)).post(1);
    for (uint32_t q = 0; q < ranks; ++q) {
        if (q != rank) w.wait(q, 1);
        sources.push_back(q == rank ? in(0) : slot(q, 0));
    }
    return w.reduce(out(0), sources, in(0), kFinal)
        .post(2)
        .plan(rank, ranks, 1, 1, 1, 2, Slots(ranks, 1));
}

// A plan in which rank r reduces part r and publishes the result.
inline std::shared_ptr<const Plan> direct(uint32_t rank, uint32_t ranks) {
    Writer w;
    std::vector<Ref> sources;
    for (uint32_t p = 0; p < ranks; ++p) {
        if (p != rank) w.copy(slot(rank, p), in(0, p), in(0, p));
    }
    w.post(1);
    for (uint32_t q = 0; q < ranks; ++q) {
        if (q != rank) w.wait(q, 1);
        sources.push_back(q == rank ? in(0, rank) : slot(q, rank));
    }
    w.reduce(out(0, rank), sources, in(0, rank), kFinal | kHasSecond, slot(rank, rank)).post(2);
    for (uint32_t q = 0; q < ranks; ++q) {
        if (q != rank) w.wait(q, 2).copy(out(0, q), slot(q, q), out(0, q));
    }
    return w.post(3).plan(rank, ranks, 1, 1, ranks, 3, Slots(ranks, ranks));
}

// A plan like `direct`, but peers read each other's memory directly (single copy). The slots hold
// only addresses.
inline std::shared_ptr<const Plan> single_copy(uint32_t rank, uint32_t ranks) {
    Writer w;
    std::vector<Ref> sources;
    for (uint32_t p = 0; p < ranks; ++p) {
        if (p != rank) w.share(slot(rank, p), in(0, p));
    }
    w.post(1);
    for (uint32_t q = 0; q < ranks; ++q) {
        if (q != rank) w.wait(q, 1);
        sources.push_back(q == rank ? in(0, rank) : shared(q, rank));
    }
    w.reduce(out(0, rank), sources, in(0, rank), kFinal | kShares, slot(rank, rank)).post(2);
    for (uint32_t q = 0; q < ranks; ++q) {
        if (q != rank) w.wait(q, 2).copy(out(0, q), shared(q, q), out(0, q));
    }
    return w.post(3).plan(rank, ranks, 1, 1, ranks, 3, Slots(ranks, ranks), 0, true);
}

// A plan like `single_copy`, but each rank writes its result to the memory of all ranks.
inline std::shared_ptr<const Plan> write_back(uint32_t rank, uint32_t ranks) {
    Writer w;
    std::vector<Ref> sources;
    for (uint32_t p = 0; p < ranks; ++p) {
        if (p != rank) w.share(slot(rank, p), in(0, p), kWritesBack);
    }
    w.post(1);
    for (uint32_t q = 0; q < ranks; ++q) {
        if (q != rank) w.wait(q, 1);
        sources.push_back(q == rank ? in(0, rank) : shared(q, rank));
    }
    w.reduce(out(0, rank), sources, in(0, rank), kFinal | kWritesBack).post(2);
    for (uint32_t q = 0; q < ranks; ++q) {
        if (q != rank) w.wait(q, 2);
    }
    return w.post(3).plan(rank, ranks, 1, 1, ranks, 3, Slots(ranks, ranks), 0, true);
}

// A plan in which rank 0 reduces everything, and writes the result to the memory of all ranks.
inline std::shared_ptr<const Plan> star(uint32_t rank, uint32_t ranks) {
    Writer w;
    std::vector<Ref> sources{in(0)};
    if (rank > 0) w.share(slot(rank, 0), in(0), kWritesBack).post(1).wait(0, 2);
    for (uint32_t q = 1; rank == 0 && q < ranks; ++q) {
        w.wait(q, 1);
        sources.push_back(shared(q, 0));
    }
    if (rank == 0) w.reduce(out(0), sources, in(0), kFinal | kWritesBack);
    return w.post(2).plan(rank, ranks, 1, 1, 1, 2, Slots(ranks, 1), 0, true);
}

// A plan of a chain: each rank adds its input to the partial sum of the next higher rank, in
// private memory. All ranks read the result from rank 0.
inline std::shared_ptr<const Plan> chain(uint32_t rank, uint32_t ranks) {
    Writer w;
    if (rank + 1 == ranks) {
        w.copy(slot(rank, 0), in(0), in(0)).post(1);
    } else {
        w.wait(rank + 1, 1).reduce(tmp(0), {in(0), slot(rank + 1, 0)}, in(0), 0);
        w.copy(slot(rank, 0), tmp(0), in(0)).post(1);
    }
    if (rank == 0) {
        w.copy(out(0), tmp(0), in(0));
    } else {
        w.wait(0, 1).copy(out(0), slot(0, 0), out(0));
    }
    return w.post(2).plan(rank, ranks, 1, 1, 1, 2, Slots(ranks, 1), 1);
}

inline std::shared_ptr<const Plan> broadcast(uint32_t rank, uint32_t ranks, uint32_t root) {
    Writer w;
    Slots slots(ranks, 0);
    slots[root] = 1;
    if (rank == root) {
        w.copy(slot(root, 0), in(0), in(0)).post(1).copy(out(0), in(0), in(0));
    } else {
        w.wait(root, 1).copy(out(0), slot(root, 0), out(0));
    }
    return w.post(2).plan(rank, ranks, 1, 1, 1, 2, slots);
}

// A plan for an all-gather of pieces of any lengths.
inline std::shared_ptr<const Plan> all_gather(uint32_t rank, uint32_t ranks) {
    Writer w;
    w.copy(slot(rank, 0), in(0), in(0)).post(1).copy(out(rank), in(0), in(0));
    for (uint32_t q = 0; q < ranks; ++q) {
        if (q != rank) w.wait(q, 1).copy(out(q), slot(q, 0), out(q));
    }
    return w.post(2).plan(rank, ranks, 1, ranks, 1, 2, Slots(ranks, 1));
}

// A plan like `all_gather`, but peers read each other's memory directly (single copy). The slots
// hold only addresses.
inline std::shared_ptr<const Plan> single_copy_gather(uint32_t rank, uint32_t ranks) {
    Writer w;
    w.share(slot(rank, 0), in(0)).post(1).copy(out(rank), in(0), in(0));
    for (uint32_t q = 0; q < ranks; ++q) {
        if (q != rank) w.wait(q, 1).copy(out(q), shared(q, 0), out(q));
    }
    return w.post(2).plan(rank, ranks, 1, ranks, 1, 2, Slots(ranks, 1), 0, true);
}

inline std::shared_ptr<const Plan> barrier(uint32_t rank, uint32_t ranks) {
    return Writer().post(1).plan(rank, ranks, 0, 0, 1, 1, Slots(ranks, 0));
}

}  // namespace unisono::hand
