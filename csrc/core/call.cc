#include "core/call.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace unisono {
namespace {

constexpr std::array kOps{"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast",
                          "reduce",     "gather",         "scatter",    "barrier",    "scan",
                          "exscan",     "split",          "window"};
constexpr std::array kReductions{"sum",  "prod", "min", "max",  "avg",        "band",   "bor",
                                 "bxor", "land", "lor", "lxor", "premul_sum", "minloc", "maxloc"};
constexpr std::array kTypes{
    "float32",       "float64",     "float16",    "bfloat16",      "int8",        "uint8",
    "int16",         "uint16",      "int32",      "uint32",        "int64",       "uint64",
    "bool",          "complex64",   "complex128", "float8_e4m3fn", "float8_e5m2", "float32_int32",
    "float64_int64", "int32_int32", "int64_int64"};
constexpr std::array kLengths{"the lengths of the pieces", "counts", "send_counts"};
static_assert(kOps.size() == kOpKinds && kLengths.size() == kLengthsFrom);
static_assert(kReductions.size() == num_reduce_ops && kTypes.size() == num_dtypes);

bool reduces(OpKind op) {
    return op == OpKind::all_reduce || op == OpKind::reduce_scatter || op == OpKind::reduce ||
           op == OpKind::scan || op == OpKind::exscan;
}

// A copy of one CallRecord of the call history, without atomics.
struct Entry {
    uint64_t seq, count, hash;
    uint32_t kind;
    int32_t root;
};

// Writes a record. Only one thread at a time writes, but other threads may read during the write. A
// reader that sees a new value also sees that `seq` has changed when it loads `seq` again. Release
// stores suffice. A fence would make the call wait for its earlier stores.
void write(CallRecord& record, const Entry& entry) noexcept {
    record.seq.store(0, std::memory_order_relaxed);
    record.kind.store(entry.kind, std::memory_order_release);
    record.count.store(entry.count, std::memory_order_release);
    record.root.store(entry.root, std::memory_order_release);
    record.hash.store(entry.hash, std::memory_order_release);
    record.seq.store(entry.seq, std::memory_order_release);
}

// Reads a record. Returns nothing if the record is empty or is being written.
std::optional<Entry> read(const CallRecord& record) noexcept {
    Entry entry{};
    entry.seq = record.seq.load(std::memory_order_acquire);
    entry.kind = record.kind.load(std::memory_order_acquire);
    entry.count = record.count.load(std::memory_order_acquire);
    entry.root = record.root.load(std::memory_order_acquire);
    entry.hash = record.hash.load(std::memory_order_acquire);
    if (entry.seq == 0 || record.seq.load(std::memory_order_relaxed) != entry.seq)
        return std::nullopt;
    return entry;
}

std::optional<Entry> entry_of(const RankControl& control, uint64_t seq) noexcept {
    const auto entry = read(control.calls[seq % kCallHistory]);
    return entry && entry->seq == seq ? entry : std::nullopt;
}

// Returns the reason of a refusal, unless a later refusal has overwritten it.
std::string refusal_text(const Refusal& refusal, uint64_t seq) {
    std::array<char, kRefusalWords * sizeof(uint64_t)> text;
    const bool found = refusal.seq.load(std::memory_order_acquire) == seq;
    for (size_t i = 0; i < kRefusalWords; ++i) {
        const uint64_t word = refusal.words[i].load(std::memory_order_relaxed);
        std::memcpy(text.data() + i * sizeof word, &word, sizeof word);
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    if (!found || refusal.seq.load(std::memory_order_relaxed) != seq) return "its arguments";
    return {text.data(), ::strnlen(text.data(), text.size())};
}

template <size_t N>
const char* name_of(const std::array<const char*, N>& names, uint32_t index) {
    return index < N ? names[index] : "?";
}

// Bits of the highest byte of a kind.
constexpr uint32_t kLengthsBits = 0x7f, kInHeaps = 1U << 31;

const char* lengths_text(uint32_t kind) {
    return name_of(kLengths, kind >> 24 & kLengthsBits);
}

}  // namespace

const char* name_of(DType type) noexcept {
    return name_of(kTypes, static_cast<uint32_t>(type));
}

const char* name_of(OpKind op) noexcept {
    return name_of(kOps, static_cast<uint32_t>(op));
}

// Returns a word with the operation, the reduction, the type, the source of the lengths, and
// whether the arrays lie in the shared heaps. The lowest 24 bits (operation, reduction and type)
// must be equal on all ranks; the highest byte is for texts only.
uint32_t kind_of(const CallArgs& a) noexcept {
    // The reduction of an operation that does not reduce is ignored. Otherwise two equal calls
    // could have different words.
    const uint32_t reduction = reduces(a.op) ? static_cast<uint32_t>(a.reduction) : 0;
    return static_cast<uint32_t>(a.op) | reduction << 8 |
           static_cast<uint32_t>(a.caller_dtype.value_or(a.dtype)) << 16 |
           static_cast<uint32_t>(a.lengths_from) << 24 | (a.in_heaps ? kInHeaps : 0);
}

void record_call(RankControl& control, uint64_t seq, const CallArgs& args, uint64_t hash) noexcept {
    write(control.calls[seq % kCallHistory], {seq, args.count, hash, kind_of(args), args.root});
}

LastCall last_call_of(const RankControl& control) noexcept {
    const uint64_t header = control.header.load(std::memory_order_acquire);
    const auto entry = read(control.calls[(header >> 40) % kCallHistory]);
    // The owner has made so many later calls that this record is overwritten.
    if (!entry || ahead_of(header, entry->seq) != 0) return {};
    return {header, entry->seq, entry->count, entry->hash, entry->kind, entry->root};
}

void update_last_call(RankControl& mirror, const LastCall& called) noexcept {
    if (called.seq == 0) return;  // the peer has made no call yet
    const auto record_of = [&](uint64_t seq) -> CallRecord& {
        return mirror.calls[seq % kCallHistory];
    };
    // `last` is the full number of the last known call. The header holds only 24 bits of the
    // number, which do not suffice because a report may arrive very late.
    const uint64_t header = mirror.header.load(std::memory_order_relaxed);
    const uint64_t last = record_of(header >> 40).seq.load(std::memory_order_relaxed);
    CallRecord& record = record_of(called.seq);
    if (record.seq.load(std::memory_order_relaxed) < called.seq)
        write(record, {called.seq, called.count, called.hash, called.kind, called.root});
    if (called.seq > last) mirror.header.store(called.header, std::memory_order_release);
}

bool differ(const RankControl& one, const RankControl& other, uint64_t seq) noexcept {
    const auto first = entry_of(one, seq), second = entry_of(other, seq);
    return first && second && first->hash != second->hash;
}

void record_refusal(RankControl& control, uint64_t seq, std::string_view reason) noexcept {
    Refusal& refusal = control.refusal;
    refusal.seq.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    for (size_t i = 0; i < kRefusalWords; ++i) {
        uint64_t word = 0;
        const size_t at = i * sizeof word;
        if (at < reason.size())
            std::memcpy(&word, reason.data() + at, std::min(sizeof word, reason.size() - at));
        refusal.words[i].store(word, std::memory_order_relaxed);
    }
    refusal.seq.store(seq, std::memory_order_release);
    write(control.calls[seq % kCallHistory], {seq, 0, kRefusedHash, kRefusedKind, -1});
}

std::string call_text(const RankControl& control, uint64_t seq) {
    const auto entry = entry_of(control, seq);
    if (!entry) return "a call that is no longer in the history";
    const uint32_t kind = entry->kind;
    if (kind == kRefusedKind)
        return "a call that it refused: " + refusal_text(control.refusal, seq);
    const auto op = static_cast<OpKind>(kind & 0xff);
    std::string text = name_of(kOps, kind & 0xff);
    if (op == OpKind::barrier || op >= OpKind::split) return text + "()";
    text += "(";
    if (reduces(op)) text += std::string(name_of(kReductions, kind >> 8 & 0xff)) + ", ";
    text += std::string(name_of(kTypes, kind >> 16 & 0xff)) + "[" +
            (entry->count == kUnknownCount ? "any" : std::to_string(entry->count)) + "]";
    if (kind >> 24 & kLengthsBits) text += std::string(", lengths from ") + lengths_text(kind);
    if (kind & kInHeaps) text += ", shared arrays";
    if (entry->root >= 0) text += ", root=" + std::to_string(entry->root);
    return text + ")";
}

std::string last_call_text(const RankControl& control) {
    uint64_t last = 0;
    for (const CallRecord& r : control.calls)
        last = std::max(last, r.seq.load(std::memory_order_relaxed));
    return last == 0 ? "it has made no call yet" : "its last call was " + call_text(control, last);
}

std::string message_text(bool sends, int32_t peer) {
    return (sends ? "send to " : "recv from ") +
           (peer < 0 ? "any rank" : "rank " + std::to_string(peer));
}

std::string activity_text(const RankControl& control) {
    const std::string text = last_call_text(control);
    const uint64_t awaited_message = control.awaited_message.load(std::memory_order_relaxed);
    if (awaited_message == 0) return text;
    const auto peer = static_cast<int32_t>(awaited_message & 0xffffffff);
    return text + ", and it waits in " +
           message_text(awaited_message == awaited_message_of(true, peer), peer);
}

std::string outcome_text(const RankControl& control, uint64_t seq) {
    const auto entry = entry_of(control, seq);
    return entry && entry->kind == kRefusedKind ? "refused " + refusal_text(control.refusal, seq)
                                                : "called " + call_text(control, seq);
}

std::string lengths_of(const RankControl& control, uint64_t seq) {
    const auto entry = entry_of(control, seq);
    return lengths_text(entry ? entry->kind : 0);
}

bool is_in_heaps(const RankControl& control, uint64_t seq) {
    const auto entry = entry_of(control, seq);
    return entry && entry->kind != kRefusedKind && (entry->kind & kInHeaps);
}

}  // namespace unisono
