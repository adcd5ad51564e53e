#include "mpi/communicator.h"

#include <array>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "mpi/comm_world.h"
#include "mpi/huge_pages.h"
#include "mpi/names.h"

namespace unisono::mpi {
namespace {

// The texts of the last errors of this process, by code.
class ErrorTexts {
  public:
    int add(std::string text) {
        const std::lock_guard lock(mutex_);
        texts_[added_ % texts_.size()] = std::move(text);
        return static_cast<int>(kFirst + added_++ % texts_.size());
    }
    std::string text(int code) {
        const std::lock_guard lock(mutex_);
        const auto place = static_cast<size_t>(code) - kFirst;
        return code < static_cast<int>(kFirst) || place >= texts_.size() ? "no error"
                                                                         : texts_[place];
    }

  private:
    static constexpr size_t kFirst = 1;
    std::mutex mutex_;
    std::array<std::string, 64> texts_;
    size_t added_ = 0;
};

// Lives as long as the process, since other threads may fail while it ends.
ErrorTexts& error_texts() {
    static auto& texts = *new ErrorTexts;
    return texts;
}

}  // namespace

int code_of(std::string text) {
    return error_texts().add(std::move(text));
}

std::string text_of(int code) {
    return error_texts().text(code);
}

Communicator::~Communicator() {
    if (!group_) return;
    for (const auto& [kind, calls] : calls_) {
        for (const auto& [count, call] : calls) group_->api->free_call(call);
    }
    group_->api->release(group_);
}

unisono_call* Communicator::prepared(const unisono_collective& collective, std::string& error) {
    const uint64_t kind =
        uint64_t{collective.op} << 32 | collective.dtype << 16 | collective.reduction;
    const std::lock_guard lock(mutex_);
    unisono_call*& call = calls_[kind][collective.count];
    if (!call) call = prepare(collective, error);
    return call;
}

// Asks Python in a thread of its own: if a thread holds the GIL while it waits for this call,
// neither would ever end.
unisono_call* Communicator::prepare(const unisono_collective& collective, std::string& error) {
    if (has_ended()) {
        error = "the interpreter has ended";
        return nullptr;
    }
    struct Answer {
        unisono_call* call = nullptr;
        unisono_error failure{};
    };
    const auto answer = std::make_shared<std::promise<Answer>>();
    auto answered = answer->get_future();
    group_->api->retain(group_);
    std::thread([answer, collective, group = group_] {
        Answer found;
        group->api->prepare(group, &collective, &found.call, &found.failure);
        answer->set_value(found);
        group->api->release(group);
    }).detach();
    if (answered.wait_for(std::chrono::duration<double>(timeout_s_)) != std::future_status::ready) {
        error =
            "Python chooses the algorithm of a new collective, and its lock (GIL) was not free "
            "within the timeout: a thread holds it while it waits for this collective";
        return nullptr;
    }
    const Answer found = answered.get();
    if (!found.call) error = found.failure.text;
    return found.call;
}

int Communicator::run(const unisono_collective& collective, const void* in, void* out) {
    if (!group_) return code_of(error_);
    std::string error;
    unisono_call* const call = prepared(collective, error);
    if (!call) return code_of(std::move(error));
    use_huge_pages(collective, ranks(), in, out);
    unisono_error failure;
    const auto status = group_->api->run(call, in, out, timeout_s_, &failure);
    return status == UNISONO_OK ? kSuccess : code_of(failure.text);
}

int Communicator::begin(const unisono_message& message, bool sends, unisono_request** request) {
    if (!group_) return code_of(error_);
    unisono_error failure;
    const auto begin = sends ? group_->api->begin_send : group_->api->begin_receive;
    const auto status = begin(group_, &message, timeout_s_, request, &failure);
    return status == UNISONO_OK ? kSuccess : code_of(failure.text);
}

int Communicator::send(const unisono_message& message) {
    if (!group_) return code_of(error_);
    unisono_error failure;
    const auto status = group_->api->send(group_, &message, timeout_s_, &failure);
    return status == UNISONO_OK ? kSuccess : code_of(failure.text);
}

int Communicator::receive(const unisono_message& message) {
    if (!group_) return code_of(error_);
    unisono_error failure;
    const auto status =
        group_->api->receive(group_, &message, timeout_s_, nullptr, nullptr, &failure);
    return status == UNISONO_OK ? kSuccess : code_of(failure.text);
}

int Communicator::exchange(const unisono_message& out, const unisono_message& in) {
    unisono_request* incoming = nullptr;
    if (const int code = begin(in, false, &incoming)) return code;
    const int code = send(out);
    const int received = wait(incoming);  // also after an error, which fails it at once
    return code ? code : received;
}

int Communicator::wait(unisono_request* request) {
    unisono_error failure;
    const auto status = group_->api->wait(request, -1, &failure);
    return status == UNISONO_OK ? kSuccess : code_of(failure.text);
}

int Communicator::split(int color, int key, Communicator** part) {
    *part = nullptr;
    if (!group_) return code_of(error_);
    unisono_group* made = nullptr;
    unisono_error failure;
    if (group_->api->split(group_, color == kUndefined ? -1 : color, key, &made, &failure) !=
        UNISONO_OK) {
        *part = new Communicator(failure.text);
        return code_of(failure.text);
    }
    if (made) *part = new Communicator(made, timeout_s_);
    return kSuccess;
}

}  // namespace unisono::mpi
