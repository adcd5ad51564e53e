// A test of the matcher, compared with a model that keeps every message and receive.
#include <deque>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "p2p/tag_matching.h"
#include "tests/report.h"

namespace {

using namespace unisono;
using namespace unisono::p2p;
using test::Report;

constexpr uint32_t kRanks = 3;
constexpr uint64_t kNoMatch = ~0ULL;

// All messages and receives in order. `over` marks matched or withdrawn messages and receives.
class Model {
  public:
    struct Posted {
        int32_t source;
        uint64_t tag;
        bool over;
    };
    struct Came {
        uint32_t source;
        uint64_t tag;
        bool over;
    };
    // Add a receive or an arrived message to the model. Each function returns the number of the
    // match, or kNoMatch.
    uint64_t receive(int32_t source, uint64_t tag) {
        posted.push_back({source, tag, false});
        const uint64_t found = first_message(source, tag);
        if (found != kNoMatch) came[found].over = posted.back().over = true;
        return found;
    }
    uint64_t arrive(uint32_t source, uint64_t tag) {
        came.push_back({source, tag, false});
        for (uint64_t i = 0; i < posted.size(); ++i) {
            if (posted[i].over || !suits(posted[i].source, posted[i].tag, came.back())) continue;
            posted[i].over = came.back().over = true;
            return i;
        }
        return kNoMatch;
    }
    [[nodiscard]] uint64_t first_message(int32_t source, uint64_t tag) const {
        for (uint64_t i = 0; i < came.size(); ++i) {
            if (!came[i].over && suits(source, tag, came[i])) return i;
        }
        return kNoMatch;
    }
    [[nodiscard]] size_t unexpected_of(uint32_t source) const {
        size_t count = 0;
        for (const Came& message : came) count += !message.over && message.source == source;
        return count;
    }

    std::vector<Posted> posted;
    std::vector<Came> came;

  private:
    static bool suits(int32_t source, uint64_t tag, const Came& message) {
        if (source != -1 && static_cast<uint32_t>(source) != message.source) return false;
        if (tag == ~0ULL)
            // A receive of any tag does not match the library's own tags.
            return message.tag < 1ULL << 63;
        return tag == message.tag;
    }
};

// Drives the matcher as the engine does.
class RandomMatching {
  public:
    RandomMatching(Report& report, uint64_t seed) : report_(report), seed_(seed), random_(seed) {}

    void run() {
        for (int step = 0; step < 300; ++step) {
            switch (random_() % 8) {
                case 0:
                case 1:
                case 2:
                    receive();
                    break;
                case 3:
                case 4:
                case 5:
                    arrive();
                    break;
                case 6:
                    withdraw();
                    break;
                default:
                    probe();
            }
            for (uint32_t rank = 0; rank < kRanks; ++rank)
                check(matcher_.unexpected_of(rank) == model_.unexpected_of(rank),
                      "the number of unexpected messages");
            check_posted();
        }
    }

  private:
    void check(bool ok, const std::string& what) {
        report_.check(ok, what + ", seed " + std::to_string(seed_));
    }
    int32_t some_source() {
        return random_() % 3 == 0 ? kAnySource : static_cast<int32_t>(random_() % kRanks);
    }
    uint64_t some_tag() {
        const uint64_t own = random_() % 4 == 0 ? kOwnTags : 0;
        return random_() % 3 == 0 ? kAnyTag : own + random_() % 2;
    }

    void receive() {
        const int32_t source = some_source();
        const uint64_t tag = some_tag();
        Request& receive =
            receives_.emplace_back(Message{nullptr, 0, DType::uint8, source, tag}, false);
        const uint64_t expected = model_.receive(source, tag);
        uint64_t matched = kNoMatch;
        if (const Envelope* const found = matcher_.find_unexpected(source, tag)) {
            matched = matcher_.take(found).id;
        } else {
            const uint64_t before = matcher_.changes();
            matcher_.post(receive);
            check(matcher_.changes() != before, "a post does not change `changes`");
        }
        check(matched == expected, "a receive's message");
    }
    void arrive() {
        const auto source = static_cast<uint32_t>(random_() % kRanks);
        const uint64_t tag = (random_() % 4 == 0 ? kOwnTags : 0) + random_() % 2;
        const uint64_t expected = model_.arrive(source, tag);
        const Envelope came{source, 0, tag, 0, model_.came.size() - 1};
        Request* const found = matcher_.find_posted(came);
        if (found) {
            check(matcher_.withdraw(*found), "a matched receive was posted");
        } else {
            matcher_.store(came);
        }
        check(number_of(found) == expected, "a message's receive");
    }
    void withdraw() {
        if (receives_.empty()) return;
        const uint64_t which = random_() % receives_.size();
        const bool expected = !std::exchange(model_.posted[which].over, true);
        check(matcher_.withdraw(receives_[which]) == expected, "the result of a withdrawal");
    }
    void probe() {
        const int32_t source = some_source();
        const uint64_t tag = some_tag();
        const Envelope* const found = matcher_.find_unexpected(source, tag);
        check((found ? found->id : kNoMatch) == model_.first_message(source, tag),
              "a probe's message");
    }
    void check_posted() {
        std::vector<uint64_t> expected, posted;
        for (uint64_t i = 0; i < model_.posted.size(); ++i) {
            if (!model_.posted[i].over) expected.push_back(i);
        }
        for (const Request* const receive : matcher_.posted()) posted.push_back(number_of(receive));
        check(posted == expected, "the order of posted receives");
    }
    [[nodiscard]] uint64_t number_of(const Request* receive) const {
        for (uint64_t i = 0; i < receives_.size(); ++i) {
            if (&receives_[i] == receive) return i;
        }
        return kNoMatch;
    }

    Report& report_;
    const uint64_t seed_;
    std::mt19937_64 random_;
    Matcher matcher_{kRanks};
    Model model_;
    std::deque<Request> receives_;
};

void check_end(Report& report) {
    Matcher matcher(2);
    Request receive({nullptr, 0, DType::uint8, 1, 3}, false);
    matcher.post(receive);
    matcher.store({0, 0, 5, 0, 1});
    report.check(matcher.take_all_posted() == std::vector<Request*>{&receive},
                 "take_all_posted returns all receives");
    matcher.forget_all();
    report.check(matcher.posted().empty() && matcher.unexpected_of(0) == 0 &&
                     !matcher.find_unexpected(kAnySource, kAnyTag) && !matcher.withdraw(receive),
                 "the matcher is empty after forget_all");
}

}  // namespace

int main() {
    Report report;
    for (uint64_t seed = 0; seed < 100; ++seed) RandomMatching(report, seed).run();
    check_end(report);
    return report.finish();
}
