// A rank's end of a group: everything that lives as long as a communicator does.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "dispatcher.h"
#include "mail.h"

namespace unisono {

class Group {
  public:
    Group(Descriptor segment, uint32_t rank, const std::array<uint8_t, 16>& nonce, uint32_t cores)
        : segment_(std::move(segment)),
          members_(segment_, rank, nonce),
          waiter_(members_, Patience::for_group(segment_.shape().ranks, cores)),
          executor_(segment_, members_, waiter_, StoreRule(segment_.shape().ranks, cores)),
          dispatcher_(executor_, members_, grace_for(segment_.shape().ranks, cores)),
          mail_(segment_, members_, waiter_) {}
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;
    ~Group() { close(); }  // first of all: nothing below waits for peers any more

    [[nodiscard]] Segment& segment() noexcept { return segment_; }
    [[nodiscard]] Membership& members() noexcept { return members_; }
    [[nodiscard]] Dispatcher& dispatcher() noexcept { return dispatcher_; }
    [[nodiscard]] PostOffice& mail() noexcept { return mail_; }
    [[nodiscard]] uint64_t calls() const noexcept { return executor_.calls(); }

    // Wakes everybody with the reason; the group is of no use afterwards.
    void abort(const std::string& reason) noexcept { members_.record(Fault::aborted, reason); }
    // What the ranks found out by themselves about calls that do not match.
    void fail_mismatch(const std::string& text) noexcept { members_.record(Fault::mismatch, text); }
    // Leaves in good order: the others may finish what does not need this rank.
    void close() noexcept {
        members_.leave();
        dispatcher_.stop();
        mail_.stop();
    }

  private:
    // With more ranks than cores nothing is gained by a thread that works beside its caller.
    static std::chrono::microseconds grace_for(uint32_t ranks, uint32_t cores) noexcept {
        return std::chrono::microseconds(ranks <= cores ? 50 : 1000);
    }

    Segment segment_;
    Membership members_;
    Waiter waiter_;
    Executor executor_;
    Dispatcher dispatcher_;
    PostOffice mail_;
};

}  // namespace unisono
