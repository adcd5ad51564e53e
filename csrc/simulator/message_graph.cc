#include "simulator/message_graph.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "simulator/holdings.h"

namespace unisono::simulator {

namespace {

constexpr size_t kMostCells = size_t{1} << 27;
constexpr uint64_t kMostVisitsEach = 8;
// If a value has more producers than this, a join task is made that waits for all of them and takes
// their place.
constexpr size_t kMostProducers = 8;
constexpr int32_t kNone = std::numeric_limits<int32_t>::min();

size_t index(int32_t i) {
    return static_cast<size_t>(i);
}

// Collects the tasks and their needs.
class MessageBuilder {
  public:
    MessageBuilder(size_t transfers, bool ordered) : ordered_(ordered) {
        m_.needs_starts.reserve(transfers + 1);
        m_.needs_starts.push_back(0);
        m_.kind.reserve(transfers);
        m_.needs.reserve(transfers);
        for (auto* column : {&m_.round, &m_.src, &m_.dst, &m_.channel, &seen_})
            column->reserve(transfers);
        m_.chunks.reserve(transfers);
    }

    // Adds a task. The calls from here to `close` describe it.
    int32_t open(Kind kind, int32_t round, int32_t src, int32_t dst, int32_t channel) {
        if (m_.kind.size() >= index(std::numeric_limits<int32_t>::max()))
            throw Error(Fault::invalid,
                        "a schedule of more than 2^31 - 1 messages: simulate fewer ranks or parts");
        m_.kind.push_back(static_cast<uint8_t>(kind));
        m_.round.push_back(round);
        m_.src.push_back(src);
        m_.dst.push_back(dst);
        m_.channel.push_back(channel);
        m_.chunks.push_back(0);
        if (ordered_) m_.after.push_back(-1);
        seen_.push_back(-1);
        return static_cast<int32_t>(m_.kind.size() - 1);
    }
    void chunks(double count) { m_.chunks.back() += count; }
    void after(int32_t task) { m_.after.back() = task; }

    // Adds a need: a task, or rank r as -1 - r.
    void need(int32_t what) {
        if (what >= 0) {
            const auto owner = static_cast<int32_t>(m_.kind.size() - 1);
            if (seen_[index(what)] == owner) return;
            seen_[index(what)] = owner;
        }
        m_.needs.push_back(what);
    }
    void need_rank(int32_t rank) {
        const auto since = m_.needs.begin() + static_cast<ptrdiff_t>(m_.needs_starts.back());
        if (std::find(since, m_.needs.end(), -1 - rank) == m_.needs.end()) need(-1 - rank);
    }
    void close() { m_.needs_starts.push_back(static_cast<int64_t>(m_.needs.size())); }

    [[nodiscard]] int32_t size() const { return static_cast<int32_t>(m_.kind.size()); }
    [[nodiscard]] Messages take() { return std::move(m_); }

  private:
    bool ordered_;
    Messages m_;
    std::vector<int32_t> seen_;  // by task: the last task that needs it
};

// The producers of a value: one task, or a list of tasks. List i is encoded as -2 - i. A list
// extends an earlier list by one task. So a sum of n contributions takes n entries, not n copies.
class Producers {
  public:
    explicit Producers(MessageBuilder& builder) : builder_(builder) {}

    void need(int32_t value) {
        if (value == kInitial) return;
        some_.clear();
        for (; value < kInitial; value = list(value).rest) some_.push_back(list(value).last);
        builder_.need(value);
        for (; !some_.empty(); some_.pop_back()) builder_.need(some_.back());
    }

    // Returns the value with one more producer. Neighbouring values mostly have the same producers,
    // and share a list.
    int32_t with(int32_t value, int32_t producer) {
        if (value == kInitial || value == producer) return producer;
        if (value == of_ && producer == by_) return made_;
        if (among_last(value, producer)) return value;
        of_ = value;
        by_ = producer;
        const uint32_t size = (value < kInitial ? list(value).size : 1) + 1;
        many_ |= size > kMostProducers;
        lists_.push_back({value, producer, size});
        return made_ = -1 - static_cast<int32_t>(lists_.size());
    }

    // Returns the last producer.
    int32_t last(int32_t value) { return value < kInitial ? list(value).last : value; }

    // Returns true if `shorten` may have to make a join task.
    [[nodiscard]] bool many() const { return many_; }

    int32_t shorten(int32_t value) {
        if (value >= kInitial || list(value).size <= kMostProducers) return value;
        const int32_t join = builder_.open(Kind::join, -1, -1, -1, 0);
        need(value);
        builder_.close();
        // From now on, the other values that refer to this list use the join task, too.
        list(value) = {join, join, 1};
        return join;
    }

  private:
    struct List {
        int32_t rest;  // the producers except the last one
        int32_t last;
        uint32_t size;
    };

    List& list(int32_t value) { return lists_[index(-2 - value)]; }

    // Returns true if the producer is among the last kMostProducers producers of the value. An
    // older producer is not found and so is added again, which costs only one more entry.
    bool among_last(int32_t value, int32_t producer) {
        for (size_t i = 0; i < kMostProducers && value < kInitial; ++i, value = list(value).rest)
            if (list(value).last == producer) return true;
        return value == producer;
    }

    MessageBuilder& builder_;
    std::vector<List> lists_;
    std::vector<int32_t> some_;
    bool many_ = false;
    int32_t of_ = kNone, by_ = kNone, made_ = kNone;  // arguments and result of the last with()
};

// Reads a schedule round by round.
template <class Holdings>
class GraphBuilder {
  public:
    GraphBuilder(const Transfers& transfers, const MessageOptions& options, uint32_t unit)
        : t_(transfers),
          o_(options),
          builder_(transfers.round.size(), options.order == Order::program),
          producers_(builder_),
          held_(options.ranks, options.locations, unit),
          parts_(options.order == Order::rounds ? options.ranks : 0),
          joined_(parts_.size(), kNone) {}

    Messages read() {
        const size_t count = t_.round.size();
        for (size_t first = 0; first < count;) {
            size_t last = first + 1;
            while (last < count && t_.round[last] == t_.round[first]) ++last;
            first_ = first;
            gather(last);
            if (producers_.many()) shorten(last);
            round_begins_ = builder_.size();
            for (const auto& [from, to] : groups_) send(from, to);
            if (o_.reductions)
                for (const auto& [from, to] : groups_) reduce(from, to);
            write(last);
            if (o_.order == Order::rounds) join(last);
            first = last;
        }
        return builder_.take();
    }

  private:
    [[nodiscard]] uint64_t key(size_t i) const {
        if (!o_.groups.empty()) return static_cast<uint32_t>(o_.groups[i]);
        return static_cast<uint64_t>(t_.src[i]) << 40 | static_cast<uint64_t>(t_.dst[i]) << 16 |
               static_cast<uint16_t>(t_.channel[i]);
    }

    // Groups the transfers of a round by message: `groups_` has each message's range in `sorted_`.
    void gather(size_t last) {
        sorted_.resize(last - first_);
        std::iota(sorted_.begin(), sorted_.end(), first_);
        const auto before = [&](size_t a, size_t b) { return key(a) < key(b); };
        if (!std::ranges::is_sorted(sorted_, before)) std::ranges::stable_sort(sorted_, before);
        groups_.clear();
        for (size_t i = 0; i < sorted_.size(); ++i) {
            if (i == 0 || key(sorted_[i]) != key(sorted_[i - 1])) groups_.emplace_back(i, i);
            groups_.back().second = i + 1;
        }
        task_.resize(last - first_);
    }

    void shorten(size_t last) {
        const auto visit = [&](int32_t& value) { value = producers_.shorten(value); };
        for (size_t i = first_; i < last; ++i) {
            held_.each(t_.src[i], t_.src_chunk[i], t_.count[i], visit);
            if (t_.reduce[i] != 0) held_.each(t_.dst[i], t_.dst_chunk[i], t_.count[i], visit);
        }
    }

    void send(size_t from, size_t to) {
        const size_t head = sorted_[from];
        const int32_t src = t_.src[head], channel = t_.channel[head];
        const int32_t task =
            builder_.open(Kind::message, t_.round[head], src, t_.dst[head], channel);
        for (size_t i = from; i < to; ++i) {
            const size_t at = sorted_[i];
            task_[at - first_] = task;
            builder_.chunks(t_.count[at]);
            held_.each(t_.src[at], t_.src_chunk[at], t_.count[at],
                       [&](int32_t value) { producers_.need(value); });
            if (o_.gates) builder_.need_rank(t_.src[at]);
            if (!joined_.empty() && joined_[index(t_.src[at])] != kNone)
                builder_.need(joined_[index(t_.src[at])]);
        }
        if (o_.order == Order::program && src != t_.dst[head]) follow(task, src, channel);
        builder_.close();
    }

    void follow(int32_t task, int32_t src, int32_t channel) {
        const size_t sender = index(src) + size_t{o_.ranks} * index(channel);
        if (sender >= last_sent_.size()) last_sent_.resize(sender + 1, -1);
        builder_.after(std::exchange(last_sent_[sender], task));
    }

    // Makes a reduction task. The task needs the arrived data and the values at the destination. It
    // is the producer of the result.
    void reduce(size_t from, size_t to) {
        double chunks = 0;
        for (size_t i = from; i < to; ++i)
            if (t_.reduce[sorted_[i]] != 0) chunks += t_.count[sorted_[i]];
        if (chunks == 0) return;
        const size_t head = sorted_[from];
        const int32_t dst = t_.dst[head];
        const int32_t task = builder_.open(Kind::reduction, t_.round[head], dst, dst, 0);
        builder_.chunks(chunks);
        builder_.need(task_[head - first_]);
        for (size_t i = from; i < to; ++i) {
            const size_t at = sorted_[i];
            if (t_.reduce[at] == 0) continue;
            task_[at - first_] = task;
            held_.each(t_.dst[at], t_.dst_chunk[at], t_.count[at],
                       [&](int32_t value) { producers_.need(value); });
            if (o_.gates) builder_.need_rank(t_.dst[at]);
        }
        builder_.close();
    }

    void write(size_t last) {
        for (size_t i = first_; i < last; ++i) {
            const int32_t producer = task_[i - first_];
            const bool adds = t_.reduce[i] != 0;
            held_.each(t_.dst[i], t_.dst_chunk[i], t_.count[i], [&](int32_t& value) {
                // A reduction task has already waited for the values that existed before the round.
                const bool keeps =
                    adds && (!o_.reductions || producers_.last(value) >= round_begins_);
                value = keeps ? producers_.with(value, producer) : producer;
            });
        }
    }

    // Makes a join task for each rank. The task waits for all that the rank has sent and received
    // so far.
    void join(size_t last) {
        std::vector<int32_t> ranks;
        for (size_t i = first_; i < last; ++i) {
            for (const int32_t rank : {t_.src[i], t_.dst[i]}) {
                if (parts_[index(rank)].empty()) ranks.push_back(rank);
                parts_[index(rank)].push_back(task_[i - first_]);
            }
        }
        for (const int32_t rank : ranks) {
            const int32_t task = builder_.open(Kind::join, t_.round[first_], rank, rank, 0);
            for (const int32_t part : parts_[index(rank)]) builder_.need(part);
            if (joined_[index(rank)] != kNone) builder_.need(joined_[index(rank)]);
            builder_.close();
            joined_[index(rank)] = task;
            parts_[index(rank)].clear();
        }
    }

    const Transfers& t_;
    const MessageOptions& o_;
    MessageBuilder builder_;
    Producers producers_;
    Holdings held_;
    size_t first_ = 0;  // index of the round's first transfer
    int32_t round_begins_ = 0;
    std::vector<size_t> sorted_;
    std::vector<std::pair<size_t, size_t>> groups_;
    std::vector<int32_t> task_;  // by transfer of the round
    std::vector<int32_t> last_sent_;
    std::vector<std::vector<int32_t>> parts_;
    std::vector<int32_t> joined_;
};

// Returns the largest unit, in chunks, such that the start and the length of every transfer are
// multiples of it.
uint32_t unit_of(const Transfers& t, uint32_t locations) {
    uint32_t unit = locations;
    for (size_t i = 0; i < t.round.size() && unit != 1; ++i)
        for (const auto* column : {&t.src_chunk, &t.dst_chunk, &t.count})
            unit = std::gcd(unit, static_cast<uint32_t>((*column)[i]));
    return std::max(unit, 1U);
}

}  // namespace

Messages messages_of(const Transfers& transfers, const MessageOptions& options) {
    const uint32_t unit = unit_of(transfers, options.locations);
    uint64_t visits = 0;
    for (const int32_t count : transfers.count) visits += static_cast<uint32_t>(count) / unit;
    const bool dense = size_t{options.ranks} * (options.locations / unit) <= kMostCells &&
                       visits <= kMostVisitsEach * transfers.round.size();
    if (dense) return GraphBuilder<DenseHoldings>(transfers, options, unit).read();
    return GraphBuilder<RunHoldings>(transfers, options, unit).read();
}

}  // namespace unisono::simulator
