// The endpoint for a rank's messages to itself.
#pragma once

#include <algorithm>
#include <cstring>
#include <list>
#include <vector>

#include "p2p/endpoint.h"

namespace unisono::p2p {

class SelfEndpoint final : public Endpoint {
  public:
    SelfEndpoint(uint32_t rank, Completion& completion) : rank_(rank), completion_(completion) {}

    bool put(Request& send) override {
        const Message& m = send.message();
        const Envelope envelope{rank_, static_cast<uint32_t>(m.dtype), m.tag, m.bytes, ++put_};
        Waiting& waiting = waiting_.emplace_back(Waiting{envelope, &send, {}});
        if (m.bytes <= kMostCopied && copied_ + m.bytes <= kMostStored) {
            waiting.data.assign(m.data, m.data + m.bytes);
            waiting.send = nullptr;
            copied_ += m.bytes;
            completion_.complete(send);
        }
        return true;
    }
    bool withdraw(Request& send) noexcept override {
        return std::erase_if(waiting_,
                             [&](const Waiting& w) { return w.send == &send && !w.claimed; }) > 0;
    }
    std::optional<Envelope> next() override {
        const auto found = std::find_if(waiting_.begin(), waiting_.end(), [this](const Waiting& w) {
            return w.envelope.id > last_returned_;
        });
        if (found == waiting_.end()) return std::nullopt;
        last_returned_ = found->envelope.id;
        return found->envelope;
    }
    bool accept(const Envelope& came, Request& receive) override {
        const auto found = std::find_if(waiting_.begin(), waiting_.end(),
                                        [&](const Waiting& w) { return w.envelope.id == came.id; });
        if (found == waiting_.end()) return false;
        const std::byte* const data =
            found->send ? found->send->message().data : found->data.data();
        if (came.bytes > 0) std::memmove(receive.message().data, data, came.bytes);
        copied_ -= found->data.size();
        if (found->send) completion_.complete(*found->send);
        waiting_.erase(found);
        completion_.complete(receive);
        return true;
    }
    bool claim(const Envelope& came) override {
        const auto found = std::find_if(waiting_.begin(), waiting_.end(),
                                        [&](const Waiting& w) { return w.envelope.id == came.id; });
        if (found == waiting_.end()) return false;
        found->claimed = true;
        return true;
    }
    void fail(const Error& error, Deadline&) noexcept override {
        for (const Waiting& w : waiting_) {
            if (!w.send) continue;
            w.send->failed(error);
            completion_.complete(*w.send);
        }
        waiting_.clear();
    }

    [[nodiscard]] bool has_arrivals() const noexcept override {
        return !waiting_.empty() && waiting_.back().envelope.id > last_returned_;
    }
    // This endpoint always has room.
    bool put_aside(Request&) override { return false; }
    void hold_back(uint64_t) override {}
    [[nodiscard]] std::optional<uint64_t> asked() const noexcept override { return std::nullopt; }
    void deny() override {}
    [[nodiscard]] uint64_t held() const noexcept override { return 0; }
    void ask(uint64_t) override {}
    Answer answer() override { return Answer::none; }
    bool progress() override { return false; }

  private:
    // Limits in bytes: the longest message that is copied so that its send completes at once, and
    // the sum of all such copies.
    static constexpr uint64_t kMostCopied = 8192, kMostStored = 256 << 10;

    struct Waiting {
        Envelope envelope;
        Request* send;  // nullptr: the send is done, and `data` has its content
        std::vector<std::byte> data;
        bool claimed = false;
    };
    const uint32_t rank_;
    Completion& completion_;
    std::list<Waiting> waiting_;
    uint64_t put_ = 0, last_returned_ = 0, copied_ = 0;
};

}  // namespace unisono::p2p
