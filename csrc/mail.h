// Point-to-point messages between the ranks of a group: one bounded mailbox per ordered pair,
// tags matched at the receiver, any number of sends and receives under way at once.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "types.h"
#include "waiter.h"

namespace unisono {

inline constexpr int32_t kAnySource = -1;

struct Message {
    std::byte* data;
    uint64_t bytes;
    DType dtype;
    int32_t peer;  // destination, source, or kAnySource
    uint64_t tag;
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
    std::optional<Error> error_;
    std::atomic<bool> done_{false};
};

class PostOffice {
  public:
    PostOffice(Segment& segment, Membership& members, Waiter waiter);
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

  private:
    // A message that arrived before anyone asked for its tag.
    struct Early {
        uint64_t tag, kind, bytes;
        std::vector<std::byte> data;
        uint64_t filled = 0;
    };
    struct Lane {  // what comes from, and goes to, one peer
        std::deque<std::shared_ptr<Parcel>> sends;
        std::shared_ptr<Parcel> receiving;  // the message at the head of the mailbox goes here,
        Early* storing = nullptr;           // or here
        std::list<Early> early;
    };

    std::shared_ptr<Parcel> begin(const Message& message, bool sends);
    void send_here(Parcel& parcel);
    bool poll();
    bool poll_lanes();
    bool poll_sends(uint32_t peer, Lane& lane);
    bool poll_receives(uint32_t peer, Lane& lane);
    bool take_early(const std::shared_ptr<Parcel>& parcel);
    void match(uint32_t peer, Lane& lane, const MailSlot& slot);
    std::shared_ptr<Parcel> wanted(uint32_t peer, uint64_t tag);
    void accept(Parcel& parcel, uint32_t peer, uint64_t kind, uint64_t bytes);
    void finish(Parcel& parcel) noexcept;
    void fail_all(const Error& error) noexcept;
    void end_all() noexcept;
    [[nodiscard]] bool idle() const noexcept;
    void progress_loop();
    [[nodiscard]] std::string late(const Parcel& parcel) const;
    void check_departed(const Parcel& parcel);

    Segment& segment_;
    Membership& members_;
    Waiter waiter_;
    std::mutex mutex_;  // guards all below
    std::vector<Lane> lanes_;
    std::list<std::shared_ptr<Parcel>> receives_;  // in the order in which they were posted
    // On the heap: a forked child has to leak it, for its end waits for threads that are not there.
    std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
    bool stopping_ = false;
    std::thread thread_;
};

}  // namespace unisono
