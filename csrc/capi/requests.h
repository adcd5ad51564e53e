// Calls and messages that C has begun.
#pragma once

#include <memory>
#include <utility>

#include "capi/unisono.h"
#include "execution/group.h"

struct unisono_request {
    unisono_request() = default;
    unisono_request(const unisono_request&) = delete;
    unisono_request& operator=(const unisono_request&) = delete;
    virtual ~unisono_request() = default;
    // Waits for at most `limit_s` seconds (negative: no limit). Returns false if the request is not
    // done. Throws the request's Error, after which it is done.
    [[nodiscard]] virtual bool finish(double limit_s) = 0;
};

namespace unisono::capi {

// For the waits of a thread of the program, as opposed to a progress thread: such a wait leaves a
// core that the thread shares with its peer. No signal ends it.
inline const Interrupted kUninterrupted = [] { return false; };

class CallRequest final : public unisono_request {
  public:
    // Begins the call.
    CallRequest(std::shared_ptr<Group> group, Execution execution, double timeout_s)
        : group_(std::move(group)),
          job_(group_->dispatcher().submit(std::move(execution), timeout_s, kInline_s)) {}
    bool finish(double limit_s) override {
        return group_->dispatcher().wait(*job_, limit_s, kUninterrupted);
    }

  private:
    // The time for which `begin` waits for the peers, which saves the hand-over to another thread.
    static constexpr double kInline_s = 100e-6;
    std::shared_ptr<Group> group_;
    std::shared_ptr<Job> job_;
};

class MessageRequest final : public unisono_request {
  public:
    MessageRequest(std::shared_ptr<Group> group, p2p::Message message, bool sends, double timeout_s)
        : group_(std::move(group)), request_(std::move(message), sends), timeout_s_(timeout_s) {}
    MessageRequest(const MessageRequest&) = delete;
    MessageRequest& operator=(const MessageRequest&) = delete;
    ~MessageRequest() override {
        if (!request_.done()) group_->p2p().end(request_);
    }
    void begin() { group_->p2p().begin(request_, true); }
    bool finish(double limit_s) override {
        p2p::Engine& engine = group_->p2p();
        const bool is_done =
            request_.done() ||
            (limit_s == 0 ? engine.test(request_) : engine.wait(request_, timeout_s_, limit_s, {}));
        if (is_done && request_.error()) throw *request_.error();
        return is_done;
    }

  private:
    std::shared_ptr<Group> group_;
    p2p::Request request_;
    double timeout_s_;
};

}  // namespace unisono::capi
