#include "mpi/communicator.h"

#include <array>
#include <utility>

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
    unisono_error failure;
    if (!call && group_->api->prepare(group_, &collective, &call, &failure) != UNISONO_OK)
        error = failure.text;
    return call;
}

int Communicator::run(const unisono_collective& collective, const void* in, void* out) {
    if (!group_) return code_of(error_);
    std::string error;
    unisono_call* const call = prepared(collective, error);
    if (!call) return code_of(std::move(error));
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

int Communicator::exchange(const unisono_message& out, const unisono_message& in) {
    unisono_request* incoming = nullptr;
    if (const int code = begin(in, false, &incoming)) return code;
    unisono_error failure;
    const auto sent = group_->api->send(group_, &out, timeout_s_, &failure);
    const int code = sent == UNISONO_OK ? kSuccess : code_of(failure.text);
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
