// Point-to-point requests for Python, and the object that keeps them alive.
#include "bind/p2p_requests.h"

#include <algorithm>
#include <string>
#include <vector>

#include "bind/errors.h"
#include "bind/gil.h"

namespace nb = nanobind;

namespace unisono::bind {
namespace {

// Largest message that moves while the thread holds the GIL.
constexpr uint64_t kMostWithGil = 64 << 10;
double limit_of(const nb::object& timeout_s) {
    return timeout_s.is_none() ? -1 : std::max(0.0, nb::cast<double>(timeout_s));
}

}  // namespace

bool may_keep_gil(const Group& group, const p2p::Message& message) noexcept {
    return message.bytes <= kMostWithGil && !group.uses_library();
}

BoundRequest& BoundRequest::of(nb::handle object) noexcept {
    return *nb::inst_ptr<BoundRequest>(object);
}

void BoundRequest::begin(bool in_background) {
    const WithoutGil release;
    engine().begin(request, in_background);
}

bool BoundRequest::try_begin(bool in_background) {
    return may_keep_gil(*group_, request.message()) && engine().try_begin(request, in_background);
}

void BoundRequest::require_started() const {
    if (starter.is_valid() && !keeper_ && !request.done())
        throw Error(Fault::invalid, text() + " was not started: call its start() first");
}

bool BoundRequest::wait_for(double limit_s) {
    require_started();
    const auto waited = [&] {
        const WithoutGil release;
        return engine().wait(request, timeout_s_, limit_s, python_signals());
    };
    try {
        if (!request.done() && !waited()) return false;
    } catch (...) {
        if (request.done()) release();
        throw;
    }
    release();
    if (request.error()) throw *request.error();
    return true;
}

nb::object BoundRequest::wait(const nb::object& timeout_s) {
    const double limit_s = limit_of(timeout_s);
    if (!wait_for(limit_s)) raise_late("the call is", limit_s);
    return result();
}

nb::object BoundRequest::exception() const {
    if (!request.done() || !request.error()) return nb::none();
    return exception_of(*request.error());
}

std::string BoundRequest::repr() const {
    std::string state = starter.is_valid() && !keeper_ ? "not started" : "pending";
    if (request.done()) state = "done";
    if (request.done() && request.error())
        state = "failed: " + nb::cast<std::string>(nb::type_name(exception().type())) + ": " +
                request.error()->what();
    return "<Work: " + text() + ", " + state + ">";
}

bool BoundRequest::test(bool ends_without_peers) {
    require_started();
    const bool done = request.done() || [&] {
        const WithoutGil release;
        return engine().test(request, ends_without_peers);
    }();
    if (done) release();
    return done;
}

bool BoundRequest::cannot_complete() {
    const WithoutGil release;
    return engine().cannot_complete(request);
}

bool BoundRequest::cancel() {
    const bool cancelled = [&] {
        const WithoutGil release;
        return engine().cancel(request);
    }();
    if (request.done()) release();
    return cancelled;
}

void BoundRequest::release() noexcept {
    if (keeper_) keeper_->release(*this);
}

void BoundRequest::end_if_late(double waited_s) {
    if (request.done() || waited_s < timeout_s_) return;
    const WithoutGil release;
    engine().expire(request, timeout_s_);
}

// ---- several requests

namespace {

bool are_requests(const nb::list& works) {
    const nb::handle type = nb::type<BoundRequest>();
    return std::all_of(works.begin(), works.end(),
                       [type](nb::handle work) { return work.type().is(type); });
}

}  // namespace

nb::object wait_all(const nb::list& works, const nb::object& timeout_s) {
    if (!are_requests(works)) return nb::borrow(Py_NotImplemented);
    const double limit_s = limit_of(timeout_s);
    Deadline deadline(limit_s);
    nb::list results;
    for (const nb::handle work : works) {
        BoundRequest& request = BoundRequest::of(work);
        const bool limited = limit_s >= 0 && !request.request.done();
        const double left_s = limited ? std::max(0.0, limit_s - deadline.elapsed_s()) : -1;
        if (!request.wait_for(left_s)) raise_late("the call is", limit_s);
        results.append(request.result());
    }
    return results;
}

nb::object wait_any(const nb::list& works, const nb::object& timeout_s) {
    if (works.size() == 0 || !are_requests(works)) return nb::borrow(Py_NotImplemented);
    const BoundRequest& first = BoundRequest::of(works[0]);
    std::vector<p2p::Request*> requests;
    for (const nb::handle work : works) {
        BoundRequest& request = BoundRequest::of(work);
        if (request.group_ != first.group_) return nb::borrow(Py_NotImplemented);
        request.require_started();
        requests.push_back(&request.request);
    }
    const double limit_s = limit_of(timeout_s);
    const auto place = [&] {
        const WithoutGil release;
        return first.engine().wait_any(requests, first.timeout_s_, limit_s, python_signals());
    }();
    if (!place) raise_late("all are", limit_s);
    BoundRequest::of(works[*place]).release();
    return nb::int_(*place);
}

// ---- keeper of pending requests

Keeper::~Keeper() {
    for (PyObject* const object : std::exchange(kept_, {})) {
        BoundRequest::of(object).keeper_ = nullptr;
        Py_DECREF(object);
    }
}

void Keeper::keep(nb::handle object, BoundRequest& request) {
    if (kept_.size() >= crowd_) {
        prune();
        crowd_ = 2 * kept_.size() + 16;
    }
    kept_.push_back(object.ptr());
    request.keeper_ = this;
    request.place_ = kept_.size() - 1;
    object.inc_ref();
}

void Keeper::release(BoundRequest& request) noexcept {
    PyObject* const object = kept_[request.place_];
    kept_[request.place_] = kept_.back();
    BoundRequest::of(kept_.back()).place_ = request.place_;
    kept_.pop_back();
    request.keeper_ = nullptr;
    Py_DECREF(object);  // last, because a destructor may run any code
}

void Keeper::prune() noexcept {
    // Checks the elements from last to first. A release fills the gap with the last element, which
    // has then already been checked. Each release may also run any code, which may keep and release
    // other requests. Some finished requests then stay until the next prune.
    for (size_t place = kept_.size(); place-- > 0;) {
        if (place >= kept_.size()) continue;
        BoundRequest& request = BoundRequest::of(kept_[place]);
        if (request.request.done()) release(request);
    }
}

}  // namespace unisono::bind
