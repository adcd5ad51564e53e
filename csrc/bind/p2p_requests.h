// Point-to-point requests for Python, and the object that keeps them alive.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/arrays.h"
#include "execution/group.h"

namespace unisono::bind {

class Keeper;

// Returns true if the message is small enough to move without releasing the GIL. Returns false if
// the message library may be a Python object, because progress then waits for the GIL.
[[nodiscard]] bool may_keep_gil(const Group& group, const p2p::Message& message) noexcept;

// A send or a receive with its memory: the `Work` of an asynchronous call.
class BoundRequest {
  public:
    BoundRequest(std::shared_ptr<Group> group, p2p::Message message, bool sends,
                 nanobind::object memory, double timeout_s)
        : request(std::move(message), sends),
          group_(std::move(group)),
          memory_(std::move(memory)),
          timeout_s_(timeout_s) {}
    BoundRequest(const BoundRequest&) = delete;
    BoundRequest& operator=(const BoundRequest&) = delete;
    // Keeps the memory until the process ends if another process may still use it.
    ~BoundRequest() {
        if (!request.needs_memory()) return;
        memory_.release();
        storage_.release();
    }

    // Returns the request inside a Python object.
    [[nodiscard]] static BoundRequest& of(nanobind::handle object) noexcept;

    p2p::Request request;
    // Starts the request again; null unless the request is persistent.
    nanobind::object starter;

    // Keeps the storage of the memory of a pending request; see `Arrays::storage_of`.
    void keep_storage(Arrays& arrays) { storage_ = arrays.storage_of(memory_); }

    // Waits for the request. Returns the memory of a receive, or None for a send. Throws the
    // request's error, or TimeoutError if the request is still pending after `timeout_s` seconds.
    nanobind::object wait(const nanobind::object& timeout_s);
    // Returns the value that `wait` returns.
    [[nodiscard]] nanobind::object result() const {
        return request.sends() ? nanobind::none() : memory_;
    }
    // Waits for the request. Returns false if the request is still pending after `limit_s` seconds
    // (negative: no limit).
    bool wait_for(double limit_s);
    [[nodiscard]] bool test(bool ends_without_peers);
    [[nodiscard]] bool cannot_complete();
    bool cancel();
    // Returns the error of a finished request, or None.
    [[nodiscard]] nanobind::object exception() const;
    // Returns a text such as "<Work: send to rank 1 (8 bytes, tag 0), pending>".
    [[nodiscard]] std::string repr() const;
    // Begins the request. This may wait for other threads; see `p2p::Engine::begin`.
    void begin(bool in_background);
    // Begins the request unless another thread holds the engine's lock.
    [[nodiscard]] bool try_begin(bool in_background);
    [[nodiscard]] std::string text() const { return p2p::Engine::text_of(request); }
    void require_started() const;
    // Fails the group if the request is still pending although it was polled for `waited_s`, and
    // this time has reached the request's timeout.
    void end_if_late(double waited_s);
    [[nodiscard]] bool under_way() const noexcept { return keeper_ && !request.done(); }
    // Makes the keeper release this request.
    void release() noexcept;

  private:
    friend class Keeper;
    friend nanobind::object wait_any(const nanobind::list& works,
                                     const nanobind::object& timeout_s);

    [[nodiscard]] p2p::Engine& engine() const noexcept { return group_->p2p(); }

    std::shared_ptr<Group> group_;
    nanobind::object memory_, storage_;
    double timeout_s_;
    Keeper* keeper_ = nullptr;  // the keeper, while it keeps this request
    size_t place_ = 0;
};

// Implement `Work.wait_all` and `Work.wait_any`. Return NotImplemented unless all works are
// requests; `wait_any` also requires that all requests belong to one communicator. No other code
// may hold the list.
[[nodiscard]] nanobind::object wait_all(const nanobind::list& works,
                                        const nanobind::object& timeout_s);
[[nodiscard]] nanobind::object wait_any(const nanobind::list& works,
                                        const nanobind::object& timeout_s);

// Keeps requests and their memory alive until they are done, even if the program drops them.
// Requires the GIL.
class Keeper {
  public:
    Keeper() = default;
    Keeper(const Keeper&) = delete;
    Keeper& operator=(const Keeper&) = delete;
    // Requires that all requests are finished; see `empty`.
    ~Keeper();

    // Keeps the Python object of a request that is about to begin.
    void keep(nanobind::handle object, BoundRequest& request);
    void release(BoundRequest& request) noexcept;
    // Releases the finished requests.
    void prune() noexcept;
    [[nodiscard]] bool empty() const noexcept { return kept_.empty(); }

  private:
    std::vector<PyObject*> kept_;
    size_t crowd_ = 16;  // number of requests at which `keep` calls `prune`
};

}  // namespace unisono::bind
