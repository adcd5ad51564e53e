// Bindings of point-to-point messages, with the fast path for arrays that need no further check.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bind/arrays.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/p2p_requests.h"
#include "bind/register.h"
#include "bind/whole.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {
namespace {

// Returns NotImplemented. The caller in Python then checks the arguments and takes the slower path.
nb::object unchecked() {
    return nb::borrow(Py_NotImplemented);
}

// Keeps the memory of a finished request until the process ends if another process may still use
// it.
class KeptMemory {
  public:
    KeptMemory(const p2p::Request& request, nb::handle memory) noexcept
        : request_(request), memory_(memory) {}
    KeptMemory(const KeptMemory&) = delete;
    KeptMemory& operator=(const KeptMemory&) = delete;
    ~KeptMemory() {
        if (request_.needs_memory()) memory_.inc_ref();
    }

  private:
    const p2p::Request& request_;
    const nb::handle memory_;
};

// The sends and receives of one communicator. Requires the GIL.
class Messages {
  public:
    Messages(std::shared_ptr<Group> group, bool single_copy)
        : group_(std::move(group)), reached_(group_->members().ranks()) {
        group_->p2p().use_single_copy(single_copy);
        for (const uint32_t rank : group_->view().here()) reach(rank);
    }
    Messages(const Messages&) = delete;
    Messages& operator=(const Messages&) = delete;
    // Cancels the messages of a communicator that the program has dropped.
    ~Messages() {
        keeper_.prune();
        if (keeper_.empty()) return;
        const WithoutGil release;
        group_->close();
    }

    double timeout_s = 0;
    // True during a batch, whose calls Python records.
    bool recording = false;

    // Records that a connection to the rank exists or is being made, so that the fast path may use
    // it.
    void reach(uint32_t rank) {
        if (reached_.at(rank)) return;
        reached_[rank] = true;
        ++reached_ranks_;
    }

    // Sends `x`. Returns None, or the work of an asynchronous send, or `unchecked()` if no send was
    // begun.
    nb::object send(nb::handle x, nb::handle dst, nb::handle tag, nb::handle later) {
        const auto peer = whole(dst), number = whole(tag);
        if (recording || !peer || !number || !knows(*peer)) return unchecked();
        return transfer(x, *peer, static_cast<uint64_t>(*number), true, later);
    }

    // Receives into `x`. Returns the source rank, or the work of an asynchronous receive, or
    // `unchecked()` if no receive was begun.
    nb::object recv(nb::handle x, nb::handle src, nb::handle tag, nb::handle later) {
        const auto peer = src.is_none() ? std::optional<int64_t>(p2p::kAnySource) : whole(src);
        const auto number = whole(tag);
        const bool any_tag = tag.is_none();
        if (recording || !peer || !(number || any_tag)) return unchecked();
        if (src.is_none() ? reached_ranks_ < reached_.size() : !knows(*peer)) return unchecked();
        return transfer(x, *peer, any_tag ? p2p::kAnyTag : static_cast<uint64_t>(*number), false,
                        later);
    }

    // Makes a request whose arguments Python has checked. The request keeps `memory` alive. Its
    // `start` calls `starter(request, True)`, unless `starter` is None.
    nb::object request(bool sends, Address data, uint64_t bytes, uint32_t dtype, int32_t peer,
                       uint64_t tag, nb::object memory, nb::object starter) {
        if (dtype >= num_dtypes)
            throw Error(Fault::invalid, "dtype: expected a number below " +
                                            std::to_string(num_dtypes) + ", got " +
                                            std::to_string(dtype));
        const Located located{data, bytes, static_cast<DType>(dtype)};
        p2p::Message message = message_of(located, peer, tag);
        nb::object made = make_request(std::move(message), sends, std::move(memory));
        if (!starter.is_none()) BoundRequest::of(made).starter = std::move(starter);
        return made;
    }

    // Begins a request, or begins a finished request again.
    void begin(nb::handle object, bool in_background) {
        BoundRequest& request = nb::cast<BoundRequest&>(object);
        if (request.under_way())
            throw Error(Fault::invalid,
                        request.text() + " is pending: wait for it before starting it again");
        if (request.request.done()) request.request.restart();
        request.release();
        start(object, request, in_background);
    }

    // Sends `x` and receives into `out` at the same time, if the two arrays do not overlap in
    // memory. Returns `out`, or `unchecked()` if neither was begun.
    nb::object sendrecv(nb::handle x, nb::handle dst, nb::handle out, nb::handle src,
                        nb::handle tag) {
        const auto to = whole(dst), from = whole(src), number = whole(tag);
        if (recording || !to || !from || !number || !knows(*to) || !knows(*from))
            return unchecked();
        const auto source = arrays_.locate(x, false), target = arrays_.locate(out, true);
        if (!source || !target || overlap(*source, *target)) return unchecked();
        const auto t = static_cast<uint64_t>(*number);
        p2p::Request incoming(message_of(*target, *from, t), false);
        p2p::Request outgoing(message_of(*source, *to, t), true);
        const KeptMemory kept_out(incoming, out), kept_x(outgoing, x);
        {
            const WithoutGil release;
            run(incoming, outgoing);
        }
        return nb::borrow(out);
    }

    using Found = std::optional<std::tuple<uint32_t, uint64_t, uint64_t, uint32_t>>;
    Found probe(int32_t source, uint64_t tag, bool waits, double limit_s, double check_s) {
        p2p::Engine& engine = group_->p2p();
        const WithoutGil release;
        const auto found =
            waits ? engine.wait_probe(source, tag, timeout_s, limit_s, python_signals(), check_s)
                  : engine.probe(source, tag);
        if (!found) return std::nullopt;
        return std::tuple(found->source, found->tag, found->bytes, found->kind);
    }

  private:
    [[nodiscard]] bool knows(int64_t rank) const noexcept {
        return rank < static_cast<int64_t>(reached_.size()) && reached_[static_cast<size_t>(rank)];
    }

    [[nodiscard]] static p2p::Message message_of(const Located& at_, int64_t peer, uint64_t tag) {
        return {at(at_.address), at_.bytes, at_.dtype, static_cast<int32_t>(peer), tag};
    }

    nb::object transfer(nb::handle x, int64_t peer, uint64_t tag, bool sends, nb::handle later) {
        const int async_op = PyObject_IsTrue(later.ptr());
        if (async_op < 0) {
            PyErr_Clear();
            return unchecked();
        }
        const auto located = arrays_.locate(x, !sends);
        if (!located) return unchecked();
        p2p::Message message = message_of(*located, peer, tag);
        if (!async_op) return run(std::move(message), sends, x);
        nb::object made = make_request(std::move(message), sends, nb::borrow(x));
        start(made, BoundRequest::of(made), true);
        return made;
    }

    nb::object make_request(p2p::Message message, bool sends, nb::object memory) const {
        nb::object made = nb::inst_alloc(type_);
        new (nb::inst_ptr<BoundRequest>(made))
            BoundRequest(group_, std::move(message), sends, std::move(memory), timeout_s);
        nb::inst_mark_ready(made);
        return made;
    }

    void start(nb::handle object, BoundRequest& request, bool in_background) {
        // The request is kept before it begins, because a signal handler may raise an exception
        // right afterwards.
        keeper_.keep(object, request);
        try {
            if (!request.try_begin(in_background)) request.begin(in_background);
        } catch (...) {
            request.release();  // does nothing if another thread has released the request
            throw;
        }
        if (request.request.done()) {
            request.release();
        } else {
            request.keep_storage(arrays_);
        }
    }

    // Runs a blocking send or receive. The caller owns the memory, so this function does not return
    // before the request is done.
    nb::object run(p2p::Message message, bool sends, nb::handle memory) {
        p2p::Request request(std::move(message), sends);
        const KeptMemory kept(request, memory);
        p2p::Engine& engine = group_->p2p();
        const bool begun =
            may_keep_gil(*group_, request.message()) && engine.try_begin(request, false);
        if (!begun || !request.done()) {
            const WithoutGil release;
            if (!begun) engine.begin(request, false);
            try {
                engine.wait(request, timeout_s, -1, python_signals());
            } catch (...) {
                engine.end(request);
                throw;
            }
        }
        if (sends) return nb::none();
        return nb::int_(request.source());
    }

    void run(p2p::Request& incoming, p2p::Request& outgoing) {
        p2p::Engine& engine = group_->p2p();
        engine.begin(incoming, false);
        try {
            engine.begin(outgoing, false);
            engine.wait(outgoing, timeout_s, -1, python_signals());
            engine.wait(incoming, timeout_s, -1, python_signals());
        } catch (...) {
            engine.end(incoming);
            engine.end(outgoing);
            throw;
        }
    }

    static bool overlap(const Located& a, const Located& b) noexcept {
        return a.address < b.address + b.bytes && b.address < a.address + a.bytes;
    }

    std::shared_ptr<Group> group_;
    const nb::handle type_ = nb::type<BoundRequest>();
    std::vector<bool> reached_;
    size_t reached_ranks_ = 0;
    Arrays arrays_;
    Keeper keeper_;
};

}  // namespace

void register_point_to_point(nb::module_& m) {
    m.attr("ANY_SOURCE") = p2p::kAnySource;
    m.attr("ANY_TAG") = p2p::kAnyTag;
    nb::class_<BoundRequest>(m, "Request", nb::is_weak_referenceable())
        .def("wait", &BoundRequest::wait, "timeout_s"_a = nb::none())
        .def("result", [](BoundRequest& self) { return self.wait(nb::none()); })
        .def(
            "_wait_native",
            [](BoundRequest& self, std::optional<double> timeout_s) {
                return self.wait_for(timeout_s.value_or(-1));
            },
            "timeout_s"_a.none())
        .def("test", [](BoundRequest& self) { return self.test(true); })
        .def("is_completed", [](BoundRequest& self) { return self.test(true); })
        .def("_poll", [](BoundRequest& self) { return self.test(false); })
        .def("_cannot_complete", &BoundRequest::cannot_complete)
        .def("exception", &BoundRequest::exception)
        .def("cancel", &BoundRequest::cancel)
        .def("source_rank", [](BoundRequest& self) { return self.request.source(); })
        .def("tag", [](BoundRequest& self) { return self.request.tag(); })
        .def("start",
             [](nb::handle self) {
                 const BoundRequest& request = BoundRequest::of(self);
                 if (!request.starter.is_valid())
                     throw Error(Fault::invalid, request.text() +
                                                     ": expected a persistent request from "
                                                     "send_init or recv_init");
                 request.starter(self, true);
                 return nb::borrow(self);
             })
        .def("_call", &BoundRequest::text)
        .def("_end_if_late", &BoundRequest::end_if_late)
        .def("__repr__", &BoundRequest::repr);
    m.def("wait_all", &wait_all, "works"_a, "timeout_s"_a.none());
    m.def("wait_any", &wait_any, "works"_a, "timeout_s"_a.none());
    nb::class_<Messages>(m, "Messages")
        .def(nb::init<std::shared_ptr<Group>, bool>(), "group"_a, "single_copy"_a)
        .def_rw("timeout_s", &Messages::timeout_s)
        .def_rw("recording", &Messages::recording)
        .def("reach", &Messages::reach, "rank"_a)
        .def("send", &Messages::send, "x"_a.none(), "dst"_a.none(), "tag"_a.none(),
             "async_op"_a.none())
        .def("recv", &Messages::recv, "x"_a.none(), "src"_a.none(), "tag"_a.none(),
             "async_op"_a.none())
        .def("sendrecv", &Messages::sendrecv, "x"_a.none(), "dst"_a.none(), "out"_a.none(),
             "src"_a.none(), "tag"_a.none())
        .def("request", &Messages::request, "sends"_a, "data"_a, "bytes"_a, "dtype"_a, "peer"_a,
             "tag"_a, "memory"_a.none(), "starter"_a = nb::none())
        .def("begin", &Messages::begin, "request"_a, "in_background"_a)
        .def("probe", &Messages::probe, "source"_a, "tag"_a, "waits"_a, "limit_s"_a,
             "check_s"_a = Waiter::kCheck_s);
}

}  // namespace unisono::bind
