// Tests of unexpected messages and of cancelled requests. The receiver stores unexpected messages
// (which no receive matches yet) as far as it has room. The sender holds back all further messages.
// If a receive matches a held-back message, the receiver asks for it.
#include <algorithm>

#include "tests/report.h"
#include "tests/stepped_ranks.h"

namespace {

using namespace unisono;
using namespace unisono::test;
using p2p::kAnySource;
using p2p::kAnyTag;

size_t waiting(const std::vector<p2p::Request*>& sends) {
    return static_cast<size_t>(
        std::count_if(sends.begin(), sends.end(), [](const auto* s) { return !s->done(); }));
}

// Receives all unexpected messages in order afterwards.
template <class Some>
void take_all(Report& report, Some& stepped, const std::vector<p2p::Request*>& sends,
              const char* what, size_t from = 0) {
    for (size_t k = from; k < sends.size(); ++k)
        report.check(stepped.brings(stepped.receive(kEager, kOther), data_of(k, kEager)),
                     std::string(what) + ": message " + std::to_string(k));
    report.check(waiting(sends) == 0, "all sends are done");
}

// The receiver stores only as many messages as it has room for.
template <class Some>
void check_room(Report& report) {
    Some stepped;
    p2p::Request& wanted = stepped.receive(10, 1);
    const auto sends = stepped.fill();
    const size_t stored = (sends.size() - waiting(sends)) * kEager;
    report.check(stored >= (240 << 10) && stored <= (256 << 10) + (128 << 10) + kEager,
                 std::to_string(stored) + " bytes of unexpected messages are stored");
    report.check(!wanted.done(), "no unexpected message matches the receive");
    p2p::Request& last = stepped.send(data_of(1, 10), 1);
    report.check(stepped.brings(wanted, data_of(1, 10)), "a message behind the unexpected ones");
    report.check(stepped.ends(last), "the send of that message");
    take_all(report, stepped, sends, "the unexpected messages");
}

// A receive gets its message even if the message is held back. Tests all lengths, on all paths, and
// with a large message sent after the held-back message.
template <class Some>
void check_found(Report& report) {
    for (const bool single_copy : {true, false}) {
        for (const size_t bytes : {0UL, 5UL, 100UL, kEager, kLarge}) {
            for (const bool posted_first : {true, false}) {
                Some stepped(2, single_copy);
                p2p::Request& wanted = stepped.receive(10, 1);
                const auto sends = stepped.fill();
                const std::string what = std::to_string(bytes) + " bytes of a requested message";
                for (uint64_t k = 0; k < 3; ++k) {
                    if (posted_first) {
                        p2p::Request& in = stepped.receive(bytes, 2);
                        stepped.settle();
                        stepped.send(data_of(k, bytes), 2);
                        report.check(stepped.brings(in, data_of(k, bytes)), what);
                    } else {
                        stepped.send(data_of(k, bytes), 2);
                        stepped.settle();
                        report.check(stepped.brings(stepped.receive(bytes, 2, kAnySource),
                                                    data_of(k, bytes)),
                                     what + ", received later");
                    }
                }
                p2p::Request& large = stepped.send(data_of(7, kLarge), kOther);
                take_all(report, stepped, sends, "the earlier messages");
                report.check(stepped.brings(stepped.receive(kLarge, kOther), data_of(7, kLarge)) &&
                                 stepped.ends(large),
                             what + ", then a large message");
            }
        }
    }
}

// A denied message may arrive later, even between the denial and the moment at which the receiver
// reads it.
template <class Some>
void check_denied(Report& report) {
    Some stepped;
    p2p::Request& never = stepped.receive(10, 1);
    stepped.fill();
    p2p::Request& wanted = stepped.receive(10, 2);
    stepped.settle();  // rank 0 denies both requests
    p2p::Request& third = stepped.receive(10, 3);
    stepped.poll(1);  // asks for the first message
    for (int i = 0; i < 3; ++i) {
        stepped.poll(0);                              // Denies the first message.
        if (i == 2) stepped.send(data_of(3, 10), 3);  // This message is sent just after the denial.
        stepped.poll(1);
    }
    report.check(stepped.brings(third, data_of(3, 10)), "a message sent just after the denial");
    stepped.send(data_of(2, 10), 2);
    report.check(stepped.brings(wanted, data_of(2, 10)), "a message sent long after the denial");
    report.check(!never.done(), "a receive without a message");
}

// Other receives may be matched while the peer is asked. No receive is skipped.
template <class Some>
void check_order_of_questions(Report& report) {
    Some stepped(3);
    p2p::Request& never = stepped.receive(10, 1, 0);
    const auto sends = stepped.fill();
    report.check(stepped[1].cancel(never), "a receive is cancelled");
    p2p::Request& any = stepped.receive(10, 2, kAnySource);
    p2p::Request& last = stepped.receive(10, 3, 0);
    stepped.settle();
    stepped.send(data_of(3, 10), 3);
    stepped.poll(1);                     // Asks rank 0 for the first receive's message.
    stepped.send(data_of(2, 10), 2, 2);  // Comes from rank 2.
    stepped.poll(0);                     // Rank 0 denies the request.
    report.check(stepped.brings(any, data_of(2, 10)) && any.source() == 2,
                 "a message from another rank");
    report.check(stepped.brings(last, data_of(3, 10)), "the message of the next receive");
    take_all(report, stepped, sends, "all other messages");
}

// A requested message comes after earlier messages with its tag and before all other messages.
void check_order(Report& report) {
    for (const bool before : {true, false}) {
        for (const bool single_copy : {true, false}) {
            SteppedRanks stepped(2, single_copy);
            p2p::Request& first = stepped.receive(kEager, 1);
            const auto sends = stepped.fill();
            const Data one = data_of(101, kEager), two = data_of(102, kEager);
            stepped.send(one, 1);
            if (before) stepped.send(two, 1);
            stepped.poll(1);               // Rank 1 asks for the message.
            if (!before) stepped.poll(0);  // Rank 0 answers with the first message.
            // Frees room for the held-back messages and for one more message: `one` or `two`,
            // whichever was not sent as the answer.
            const uint64_t enough = stepped.pair().slots_taken + waiting(sends) + 1;
            size_t taken = 0;
            for (; taken < sends.size() && stepped.pair().slots_taken < enough; ++taken)
                report.check(stepped.receive(kEager, kOther).done(), "a message that has arrived");
            report.check(!first.done(), "the first receive is still pending");
            if (!before) stepped.send(two, 1);
            stepped.poll(0);  // fills the room, then answers if rank 0 has not answered yet
            report.check(waiting(sends) == 0, "all held-back messages have room");
            p2p::Request& second = stepped.receive(kEager, 1);
            report.check(stepped.brings(first, one) && stepped.brings(second, two),
                         before ? "a requested message behind an earlier one"
                                : "a requested message ahead of a later one");
            take_all(report, stepped, sends, "the other messages", taken);
        }
    }
}

// A receive may be cancelled after its message was requested. The answer, which no receive needs
// any more, must not block other messages.
template <class Some>
void check_answers_no_longer_wanted(Report& report) {
    Some stepped;
    p2p::Request& first = stepped.receive(kLarge, 1);
    const auto sends = stepped.fill();
    for (uint64_t k = 0; k < 3; ++k) {
        p2p::Request& wanted = k == 0 ? first : stepped.receive(kLarge, 1 + k);
        stepped.settle();
        stepped.send(data_of(k, kLarge), 1 + k);
        stepped.poll(1);
        stepped.poll(0);  // rank 0 answers the request
        report.check(stepped[1].cancel(wanted), "a receive is cancelled");
    }
    stepped.send(data_of(5, 10), 5);
    report.check(stepped.brings(stepped.receive(10, 5), data_of(5, 10)),
                 "another message after an unused answer");
    for (uint64_t k = 0; k < 3; ++k)
        report.check(stepped.brings(stepped.receive(kLarge, 1 + k), data_of(k, kLarge)),
                     "the message of the unused answer");
    take_all(report, stepped, sends, "all other messages");
}

// A probe finds a message that is held back behind unexpected messages.
template <class Some>
void check_probe(Report& report) {
    Some stepped;
    std::vector<p2p::Request*> sends;
    for (size_t k = 0; k < kMost; ++k) sends.push_back(&stepped.send(data_of(k, kEager), kOther));
    stepped.send(data_of(4, 10), 4);
    std::optional<p2p::Envelope> found;
    for (int i = 0; i < 1000 && !found; ++i) {
        found = stepped[1].probe(kAnySource, 4);
        stepped.poll(0);
    }
    report.check(found && found->tag == 4 && found->bytes == 10 && found->source == 0, "a probe");
    report.check(!stepped[1].probe(0, 5), "a probe without a message");
    report.check(stepped.brings(stepped.receive(10, 4), data_of(4, 10)), "the probed message");
    found = stepped[1].probe(0, kAnyTag);
    report.check(found && found->tag == kOther && found->bytes == kEager,
                 "a probe of any tag finds the first message");
    take_all(report, stepped, sends, "all other messages");
}

// ---- cancelled requests

template <class Some>
void check_cancelled_receives(Report& report) {
    for (const bool single_copy : {true, false}) {
        Some stepped(2, single_copy);
        p2p::Request& posted = stepped.receive(10, 1);
        report.check(stepped[1].cancel(posted) && posted.done() && posted.error() &&
                         posted.error()->fault() == Fault::invalid && !stepped[1].cancel(posted),
                     "a receive is cancelled only once");
        stepped.send(data_of(1, 10), 1);
        stepped.settle();
        report.check(Some::got(posted) == Data(10), "a cancelled receive gets no message");
        report.check(stepped.brings(stepped.receive(10, 1), data_of(1, 10)),
                     "the next receive gets the message");
        stepped.send(data_of(2, kLarge), 2);
        p2p::Request& moving = stepped.receive(kLarge, 2);
        report.check(!moving.done() && !stepped[1].cancel(moving),
                     "a receive that has begun cannot be cancelled");
        report.check(stepped.brings(moving, data_of(2, kLarge)), "it completes normally");
    }
}

void check_cancelled_sends(Report& report) {
    for (const bool single_copy : {true, false}) {
        SteppedRanks stepped(2, single_copy);
        report.check(!stepped[0].cancel(stepped.send(Data(10), 1)),
                     "a finished send cannot be cancelled");
        for (int i = 0; i < 200;
             ++i) {  // more sends than there are transfers, so each transfer must become free again
            report.check(stepped[0].cancel(stepped.send(Data(kLarge), 1)),
                         "an offered send is cancelled");
            if (i == 0)
                report.check(stepped.brings(stepped.receive(10, 1), Data(10)),
                             "an earlier message");
            if (i % 50 == 0) {
                stepped.send(data_of(2, kLarge), 1);
                report.check(stepped.brings(stepped.receive(kLarge, 1), data_of(2, kLarge)),
                             "a later message");
            }
        }
        p2p::Request& any = stepped.receive(10, kAnyTag, kAnySource);
        stepped.settle();
        report.check(!any.done() && any.source() == kAnySource && any.tag() == kAnyTag,
                     "no receive gets a cancelled message");
        stepped.send(data_of(3, 10), 3);
        report.check(stepped.brings(any, data_of(3, 10)) && any.tag() == 3,
                     "the next message arrives");
        p2p::Request& moving = stepped.send(data_of(4, kLarge), 4);
        p2p::Request& in = stepped.receive(kLarge, 4);
        report.check(!stepped[0].cancel(moving),
                     "a send that is being received cannot be cancelled");
        report.check(stepped.brings(in, data_of(4, kLarge)) && stepped.ends(moving),
                     "it completes normally");
        stepped.receive(10, 1);
        const auto sends = stepped.fill();
        report.check(waiting(sends) > 0 && stepped[0].cancel(*sends.back()),
                     "a held-back send is cancelled");
        p2p::Request& large = stepped.send(Data(kLarge), 1);
        report.check(stepped[0].cancel(large), "a large held-back send is cancelled");
        for (size_t k = 0; k + 1 < sends.size(); ++k)
            report.check(stepped.brings(stepped.receive(kEager, kOther), data_of(k, kEager)),
                         "the earlier messages");
        stepped.send(data_of(6, kEager), kOther);
        report.check(stepped.brings(stepped.receive(kEager, kOther), data_of(6, kEager)),
                     "a message behind a cancelled one");
    }
}

// Across hosts, a send can be cancelled while it is held back, but not once it has left.
void check_sends_cancelled_across_hosts(Report& report) {
    SteppedHosts stepped;
    p2p::Request& left = stepped.send(data_of(200, kLarge), 4);
    report.check(!left.done() && !stepped[0].cancel(left),
                 "a partly sent message cannot be cancelled");
    p2p::Request& never = stepped.receive(10, 1);
    const auto sends = stepped.fill();  // the last three are held back
    const auto taken_back = [&](p2p::Request& send) {
        return stepped[0].cancel(send) && send.done() && send.error() &&
               send.error()->fault() == Fault::invalid && !stepped[0].cancel(send);
    };
    report.check(!stepped[0].cancel(*sends.front()), "a finished send cannot be cancelled");
    const size_t last = sends.size() - 1;
    report.check(taken_back(*sends[last - 1]), "a held-back send is cancelled");
    p2p::Request& large = stepped.send(data_of(201, kLarge), kOther);
    p2p::Request& behind = stepped.send(data_of(202, kLarge), kOther);
    report.check(taken_back(large), "a large held-back send is cancelled");
    p2p::Request& wanted = stepped.receive(kEager, 2);
    stepped.poll(0);  // Rank 0 denies the first request.
    stepped.poll(1);  // Rank 1 asks for the other message.
    p2p::Request& asked = stepped.send(data_of(203, kEager), 2);
    report.check(!asked.done() && taken_back(asked), "a requested send is cancelled");
    stepped.settle();
    report.check(!wanted.done() && !never.done(), "no receive gets a cancelled message");
    report.check(
        stepped.brings(stepped.receive(kLarge, 4), data_of(200, kLarge)) && stepped.ends(left),
        "a partly sent message arrives");
    for (size_t k = 0; k <= last; ++k) {
        if (k != last - 1)
            report.check(stepped.brings(stepped.receive(kEager, kOther), data_of(k, kEager)),
                         "a message that was not cancelled, " + std::to_string(k));
    }
    report.check(stepped.brings(stepped.receive(kLarge, kOther), data_of(202, kLarge)) &&
                     stepped.ends(behind),
                 "a message behind the cancelled ones");
    stepped.send(data_of(204, kEager), 2);
    report.check(stepped.brings(wanted, data_of(204, kEager)),
                 "another message for the waiting receive");
    for (p2p::Request* const send : stepped.fill())
        stepped[0].cancel(*send);  // cancels all held-back sends
    stepped.send(data_of(205, 10), 1);
    report.check(stepped.brings(never, data_of(205, 10)), "a message after all held-back ones");
}

template <class Some>
void check_everywhere(Report& report) {
    check_room<Some>(report);
    check_found<Some>(report);
    check_denied<Some>(report);
    check_order_of_questions<Some>(report);
    check_answers_no_longer_wanted<Some>(report);
    check_probe<Some>(report);
    check_cancelled_receives<Some>(report);
}

}  // namespace

int main() {
    Report report;
    check_everywhere<SteppedRanks>(report);
    check_everywhere<SteppedHosts>(report);
    check_order(report);
    check_cancelled_sends(report);
    check_sends_cancelled_across_hosts(report);
    return report.finish();
}
