// Point-to-point messages between the ranks of a group: one bounded mailbox per ordered pair,
// tags matched at the receiver, any number of sends and receives under way at once.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "fault_news.h"
#include "types.h"
#include "view.h"
#include "waiter.h"
#include "wire.h"

namespace unisono {

inline constexpr int32_t kAnySource = -1;

struct Message {
    std::byte* data;
    uint64_t bytes;
    DType dtype;
    int32_t peer;  // destination, source, or kAnySource
    uint64_t tag;
    // Holds the memory where a wire may use it for longer than the call lasts.
    std::shared_ptr<void> keep = nullptr;
};

// One send or receive under way.
class Parcel {
  public:
    Parcel(const Message& message, bool sends)
        : message_(message), sends_(sends), source_(message.peer) {}
    [[nodiscard]] bool done() const noexcept { return done_.load(std::memory_order_acquire); }
    [[nodiscard]] const std::optional<Error>& error() const noexcept { return error_; }
    // Where a message came from, once it has come.
    [[nodiscard]] int32_t source() const noexcept {
        return source_.load(std::memory_order_relaxed);
    }

  private:
    friend class PostOffice;
    const Message message_;
    const bool sends_;
    std::atomic<int32_t> source_;
    uint64_t moved_ = 0;
    uint64_t letter_ = 0;  // to another host: its number among those to that rank
    std::optional<Error> error_;
    std::atomic<bool> done_{false};
};

class PostOffice final : private Receiver {
  public:
    // `make_wire(receiver)` makes the wire to ranks of other hosts, if there are any.
    using MakeWire = std::function<std::unique_ptr<Wire>(Receiver&)>;
    PostOffice(View& view, Membership& members, Waiter waiter, const MakeWire& make_wire = {});
    PostOffice(const PostOffice&) = delete;
    PostOffice& operator=(const PostOffice&) = delete;
    ~PostOffice() { stop(); }

    // Begins at once, as far as that goes without waiting.
    std::shared_ptr<Parcel> send(const Message& message);
    std::shared_ptr<Parcel> receive(const Message& message);
    // Lets a thread of its own carry on with whatever is under way.
    void carry_on();
    // False after `limit_s` (negative: never) with the parcel still under way. After `timeout_s`
    // the group fails. Throws Error.
    bool wait(Parcel& parcel, double timeout_s, double limit_s, const Interrupted& interrupted);
    // After the group was left. What is under way fails as aborted.
    void stop() noexcept;
    // To ranks of other hosts.
    [[nodiscard]] Wire* wire() const noexcept { return wire_.get(); }

  private:
    // A message that arrived before anyone asked for its tag.
    struct Early {
        uint64_t tag, kind, bytes;
        std::unique_ptr<std::byte[]> data;  // untouched: a length alone costs no memory
        uint64_t filled = 0;
        std::shared_ptr<Parcel> claimant;  // who gets it once all of it is there
    };
    struct Lane {  // what comes from, and goes to, one peer
        std::deque<std::shared_ptr<Parcel>> sends;
        std::shared_ptr<Parcel> receiving;  // the message at the head of the mailbox goes here,
        Early* storing = nullptr;           // or here
        std::list<Early> early;
        uint64_t letters = 0;   // sent to another host
        bool departed = false;  // of another host: it has left, and all that it sent has come
    };

    std::shared_ptr<Parcel> begin(const Message& message, bool sends);
    void send_here(Parcel& parcel);
    bool poll();
    bool poll_lanes();
    bool poll_sends(uint32_t peer, Lane& lane);
    bool poll_receives(uint32_t peer, Lane& lane);
    bool poll_letters(uint32_t peer, Lane& lane);
    bool take_early(const std::shared_ptr<Parcel>& parcel);
    void match(uint32_t peer, Lane& lane, uint64_t tag, uint64_t kind, uint64_t bytes);
    std::byte* place(uint32_t peer, const Frame& frame) override;
    void deliver(uint32_t peer, const Frame& frame) override;
    void lost(uint32_t peer, const std::string& why) override;
    [[noreturn]] void nonsense(uint32_t peer, const std::string& what) override {
        members_.fail_nonsense(peer, what);
    }
    std::shared_ptr<Parcel> wanted(uint32_t peer, uint64_t tag);
    void accept(Parcel& parcel, uint32_t peer, uint64_t kind, uint64_t bytes);
    void finish(Parcel& parcel) noexcept;
    void fail_all(const Error& error) noexcept;
    void keep(Lane& lane) noexcept;
    void end_all() noexcept;
    [[nodiscard]] bool idle() const noexcept;
    void progress_loop();
    template <class Awake>
    Woken rest(bool here, bool away, Awake&& awake, double seconds);
    [[nodiscard]] bool has_departed(uint32_t peer) const noexcept;
    [[nodiscard]] std::string late(const Parcel& parcel) const;
    void check_departed(const Parcel& parcel);

    View& view_;
    Membership& members_;
    Waiter waiter_;
    std::unique_ptr<Wire> wire_;
    std::atomic<uint32_t> away_sleepers_{0};
    std::mutex mutex_;  // guards all below
    std::vector<Lane> lanes_;
    std::list<std::shared_ptr<Parcel>> receives_;  // in the order in which they were posted
    // On the heap: a forked child has to leak it, for its end waits for threads that are not there.
    std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
    bool stopping_ = false;
    bool wire_closed_ = false;
    bool unfinished_ = false;  // a letter was given up
    FaultNews news_;
    std::byte nowhere_{};  // where letters without content go
    std::thread thread_;
};

}  // namespace unisono
