// Matches messages to receives by MPI's rules. Does no I/O and never waits.
//
// Messages from one rank with one tag are received in the order in which they were sent, by
// receives in the order in which they were posted. A receive of any source or tag takes the message
// that arrived first. (MPI 4.1, section 3.5.)
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <vector>

#include "p2p/message_request.h"

namespace unisono::p2p {

// The known facts about a message that has arrived, completely or in part.
struct Envelope {
    uint32_t source;
    uint32_t kind;  // element type, according to the sender
    uint64_t tag;
    uint64_t bytes;
    uint64_t id;  // the endpoint's number for the message
};

[[nodiscard]] inline bool fits(int32_t source, uint64_t tag, const Envelope& came) noexcept {
    return (source == kAnySource || source == static_cast<int32_t>(came.source)) &&
           (tag == kAnyTag ? came.tag < kOwnTags : tag == came.tag);
}

class Matcher {
  public:
    explicit Matcher(uint32_t ranks) : unexpected_of_(ranks) {}

    void post(Request& receive) {
        posted_.push_back(&receive);
        ++changes_;
    }
    // Returns the first posted receive that matches the message, or nullptr.
    [[nodiscard]] Request* find_posted(const Envelope& came) const noexcept {
        for (Request* receive : posted_) {
            if (fits(receive->message().peer, receive->message().tag, came)) return receive;
        }
        return nullptr;
    }
    // Removes a posted receive. Returns false if the receive is not posted, because it was matched.
    bool withdraw(const Request& receive) noexcept {
        const auto found = std::find(posted_.begin(), posted_.end(), &receive);
        if (found == posted_.end()) return false;
        posted_.erase(found);
        ++changes_;
        return true;
    }

    // Stores a message that no posted receive matches.
    void store(const Envelope& came) {
        unexpected_.push_back(came);
        ++unexpected_of_[came.source];
    }
    // Returns the first stored message that matches a receive, or nullptr.
    [[nodiscard]] const Envelope* find_unexpected(int32_t source, uint64_t tag) const noexcept {
        const bool none = source == kAnySource ? unexpected_.empty()
                                               : unexpected_of_[static_cast<size_t>(source)] == 0;
        if (none) return nullptr;
        for (const Envelope& came : unexpected_) {
            if (fits(source, tag, came)) return &came;
        }
        return nullptr;
    }
    // Removes a stored message. `came` must be a result of `find_unexpected`.
    Envelope take(const Envelope* came) noexcept {
        const auto found = std::find_if(unexpected_.begin(), unexpected_.end(),
                                        [came](const Envelope& e) { return &e == came; });
        const Envelope taken = *found;
        unexpected_.erase(found);
        --unexpected_of_[taken.source];
        return taken;
    }

    [[nodiscard]] const std::vector<Request*>& posted() const noexcept { return posted_; }
    // Returns a number that changes whenever the list of posted receives changes.
    [[nodiscard]] uint64_t changes() const noexcept { return changes_; }
    [[nodiscard]] size_t unexpected_of(uint32_t source) const noexcept {
        return unexpected_of_[source];
    }
    [[nodiscard]] std::vector<Request*> take_all_posted() noexcept { return std::move(posted_); }
    void forget_all() noexcept {
        posted_.clear();
        unexpected_.clear();
        std::fill(unexpected_of_.begin(), unexpected_of_.end(), 0);
    }

  private:
    std::vector<Request*> posted_;    // In the order of posting.
    std::list<Envelope> unexpected_;  // In the order of arrival.
    std::vector<size_t> unexpected_of_;
    uint64_t changes_ = 0;
};

}  // namespace unisono::p2p
