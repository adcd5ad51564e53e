// A fuzz target: one of two ranks, with a scripted peer behind a message library. The fuzzer's
// bytes determine the heads that the peer sends, the times at which payloads arrive or fail, and
// the messages that this rank sends and receives.
#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "fuzz/one_of_two.h"
#include "transport/message_transport.h"

namespace unisono::fuzz {
namespace {

// A message library that finishes a transfer only when the script does so.
class Library final : public MessageLibrary {
  public:
    void listen(std::byte* memory, uint64_t slot_bytes, uint32_t slots) override {
        memory_ = memory;
        slot_bytes_ = slot_bytes;
        slots_ = free_ = slots;
    }
    void reuse() override { require(++free_ <= slots_); }
    bool send_head(uint32_t peer, const std::byte* data, uint64_t bytes, uint64_t ticket) override {
        require(bytes <= slot_bytes_);
        return send(peer, data, bytes, ticket);
    }
    bool send(uint32_t peer, const std::byte* data, uint64_t bytes, uint64_t ticket) override {
        require(peer == 1);
        for (uint64_t i = 0; i < bytes; ++i) sum_ = sum_ + std::to_integer<uint8_t>(data[i]);
        if (at_once_) return true;
        under_way_.push_back({ticket, nullptr, 0});
        return false;
    }
    bool receive(uint32_t peer, std::byte* data, uint64_t bytes, uint64_t ticket) override {
        require(peer == 1 && data);
        under_way_.push_back({ticket, data, bytes});
        return false;
    }
    uint32_t poll(std::vector<Ended>& ended) override {
        std::move(ended_.begin(), ended_.end(), std::back_inserter(ended));
        ended_.clear();
        uint32_t filled = 0;
        for (; !heads_.empty() && free_ > 0; heads_.pop_front(), --free_, ++filled) {
            std::byte* const slot = memory_ + next_++ % slots_ * slot_bytes_;
            std::copy(heads_.front().begin(), heads_.front().end(), slot);
        }
        return filled;
    }
    [[nodiscard]] bool close() noexcept override { return true; }

    void deliver(const void* data, size_t bytes) {
        const auto* const begin = static_cast<const std::byte*>(data);
        heads_.emplace_back(begin, begin + std::min<size_t>(bytes, slot_bytes_));
    }
    // Ends one of the pending transfers; a received payload is then complete.
    void end(size_t which, bool fails) {
        if (under_way_.empty()) return;
        const auto found = under_way_.begin() + static_cast<ptrdiff_t>(which % under_way_.size());
        if (!fails && found->bytes > 0) {
            std::fill_n(found->data, std::min(found->bytes, uint64_t{1} << 16), std::byte{1});
            found->data[found->bytes - 1] = std::byte{1};
        }
        ended_.push_back({found->ticket, fails ? "the library says so" : ""});
        under_way_.erase(found);
    }
    void send_at_once(bool at_once) { at_once_ = at_once; }

  private:
    struct Transfer {
        uint64_t ticket;
        std::byte* data;
        uint64_t bytes;
    };
    std::byte* memory_ = nullptr;
    uint64_t slot_bytes_ = 0;
    uint32_t slots_ = 0, free_ = 0, next_ = 0;
    bool at_once_ = false;
    uint8_t sum_ = 0;  // sum of all sent bytes; computed only so that every byte is read
    std::deque<std::vector<std::byte>> heads_;
    std::vector<Transfer> under_way_;
    std::vector<Ended> ended_;
};

class Script : private OneOfTwo {
  public:
    explicit Script(Bytes bytes) : OneOfTwo(bytes) {}
    ~Script() {
        // Without a failure, the destructor would wait for pending requests.
        members_.record(Fault::aborted, "the script is over");
        members_.leave();
        p2p_.stop();
        transport_.close(members_.failure());
    }

    void play() {
        OneOfTwo::play(p2p_, [this] { step(); }, [this] { poll_calls(); });
    }

  private:
    // A copy of the transport's private types.
    struct Span {
        uint64_t place, bytes;
    };
    struct Head {
        Frame frame;
        uint32_t from;
        uint16_t spans, inside;
    };
    static_assert(sizeof(Head) == 88);

    // Polls as the thread that drives the calls does.
    void poll_calls() {
        try {
            transport_.poll();
        } catch (const Error& error) {
            members_.record(error.fault(), error.what());
            throw;
        }
    }

    void step() {
        const auto what = bytes_.take<uint8_t>();
        Library& library = what & 8 ? *messages_ : *calls_;
        switch (what & 7) {
            case 0:
                return deliver_bytes(library);
            case 1:
                return exchange(p2p_, false);
            case 2:
                return exchange(p2p_, true);
            case 3:
                return library.end(what >> 4, false);
            case 4:
                return library.end(what >> 4, what >> 7);
            case 5:
                return what & 16 ? change(p2p_) : library.send_at_once(what >> 7);
            default:
                return deliver_head(library);
        }
    }

    void deliver_bytes(Library& library) {
        const auto piece = take_piece().first;
        library.deliver(piece.data(), piece.size());
    }

    // Sends a head built from few bytes. The sum of the spans equals the payload unless the script
    // overrides it.
    void deliver_head(Library& library) {
        Head head{};
        Frame& frame = head.frame;
        frame.kind = static_cast<FrameKind>(bytes_.take<uint8_t>() % 16);
        frame.size_class = bytes_.take<uint8_t>() % 4;
        frame.number = bytes_.take<uint8_t>();
        frame.place = bytes_.take<uint8_t>();
        frame.loads = bytes_.take<uint8_t>() % 2;
        take_sender(frame);
        const auto flags = bytes_.take<uint8_t>();
        head.from = flags & 1 ? bytes_.take<uint8_t>() : 1;
        head.inside = flags >> 1 & 1;
        std::vector<Span> spans(flags >> 4);
        for (Span& span : spans) {
            span.place = bytes_.take<uint16_t>();
            span.bytes = bytes_.take<uint16_t>();
            frame.bytes += span.bytes;
        }
        if (flags & 4) frame.bytes = bytes_.take<uint32_t>();
        head.spans = flags & 8 ? bytes_.take<uint16_t>() : static_cast<uint16_t>(spans.size());
        const size_t after = spans.size() * sizeof(Span);
        std::vector<std::byte> message(sizeof(head) + after);
        std::memcpy(message.data(), &head, sizeof(head));
        if (after) std::memcpy(message.data() + sizeof(head), spans.data(), after);
        library.deliver(message.data(), message.size());
    }

    std::unique_ptr<MessageLibrary> library(Library*& made) {
        auto library = std::make_unique<Library>();
        made = library.get();
        return library;
    }

    Library *calls_ = nullptr, *messages_ = nullptr;
    MessageTransport transport_{view_, remote_slots_, library(calls_)};
    p2p::Engine p2p_{
        view_, members_, waiter_, cross_memory_, counters_, [this](Receiver& receiver) {
            return std::make_unique<MessageTransport>(view_, receiver, library(messages_));
        }};
};

}  // namespace

void feed_messages(const uint8_t* data, size_t size) {
    if (size > 4096) return;  // longer input reaches no new code
    Script(Bytes(data, size)).play();
}

}  // namespace unisono::fuzz
