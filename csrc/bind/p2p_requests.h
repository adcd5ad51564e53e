// Requests as Python has them, and who keeps them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "execution/group.h"

namespace unisono::bind {

class Keeper;

// Whether a message is small enough to be moved by who has the GIL.
[[nodiscard]] bool may_keep_gil(const Group& group, const p2p::Message& message) noexcept;

// A send or a receive with its memory: what Python has as the `Work` of an asynchronous one.
class BoundRequest {
  public:
    BoundRequest(std::shared_ptr<Group> group, p2p::Message message, bool sends,
                 nanobind::object memory, double timeout_s)
        : request(std::move(message), sends),
          group_(std::move(group)),
          memory_(std::move(memory)),
          timeout_s_(timeout_s) {}

    // Of the Python object that has it.
    [[nodiscard]] static BoundRequest& of(nanobind::handle object) noexcept;

    p2p::Request request;
    // What may begin it again; null unless it is persistent.
    nanobind::object starter;

    // The memory of a receive, None of a send. Throws what it failed with, or TimeoutError if it is
    // still under way after so many seconds.
    nanobind::object wait(const nanobind::object& timeout_s);
    // What `wait` returns.
    [[nodiscard]] nanobind::object result() const {
        return request.sends() ? nanobind::none() : memory_;
    }
    // False after `limit_s` seconds (negative: never) with the request still under way.
    bool wait_for(double limit_s);
    [[nodiscard]] bool test(bool ends_in_vain);
    [[nodiscard]] bool is_in_vain();
    bool cancel();
    // What it failed with, once it is done.
    [[nodiscard]] nanobind::object exception() const;
    // "<Work: send to rank 1 (8 bytes, tag 0), pending>".
    [[nodiscard]] std::string repr() const;
    // Begins it, for which it may wait for other threads; see `p2p::Engine::begin`.
    void begin(bool carried);
    // The same unless there are such threads.
    [[nodiscard]] bool try_begin(bool carried);
    [[nodiscard]] std::string text() const { return p2p::Engine::text_of(request); }
    void require_started() const;
    // After it was waited for by looks for so long: ends the group if that is its time.
    void end_if_late(double waited_s);
    [[nodiscard]] bool under_way() const noexcept { return keeper_ && !request.done(); }
    // Nobody has to keep it any more.
    void let_go() noexcept;

  private:
    friend class Keeper;
    friend nanobind::object wait_any(const nanobind::list& works,
                                     const nanobind::object& timeout_s);

    [[nodiscard]] p2p::Engine& engine() const noexcept { return group_->p2p(); }

    std::shared_ptr<Group> group_;
    nanobind::object memory_;
    double timeout_s_;
    Keeper* keeper_ = nullptr;  // while that has it
    size_t place_ = 0;
};

// `Work.wait_all` and `Work.wait_any` of requests alone, the latter of one communicator: else
// NotImplemented. Nobody else may have the list.
[[nodiscard]] nanobind::object wait_all(const nanobind::list& works,
                                        const nanobind::object& timeout_s);
[[nodiscard]] nanobind::object wait_any(const nanobind::list& works,
                                        const nanobind::object& timeout_s);

// Keeps requests with their memory until they are done, even if the program drops them. To be used
// with the GIL.
class Keeper {
  public:
    Keeper() = default;
    Keeper(const Keeper&) = delete;
    Keeper& operator=(const Keeper&) = delete;
    // Only those that are done may be left: see `empty`.
    ~Keeper();

    // The Python object of a request that is about to begin.
    void keep(nanobind::handle object, BoundRequest& request);
    void let_go(BoundRequest& request) noexcept;
    // Lets go of those that are done.
    void prune() noexcept;
    [[nodiscard]] bool empty() const noexcept { return kept_.empty(); }

  private:
    std::vector<PyObject*> kept_;
    size_t crowd_ = 16;  // look for those that are done when there are more
};

}  // namespace unisono::bind
