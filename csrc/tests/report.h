// The results of a test program. Any thread may add a result.
#pragma once

#include <cstddef>
#include <cstdio>
#include <mutex>
#include <string>

namespace unisono::test {

class Report {
  public:
    void check(bool ok, const std::string& what) {
        const std::lock_guard lock(mutex_);
        (ok ? passed_ : failed_) += 1;
        if (!ok && failed_ <= 20) std::printf("FAILED %s\n", what.c_str());
    }
    // Returns true if a check can run on this machine. Otherwise reports the skipped check and the
    // reason.
    bool can_run(const char* check, bool able, const char* why_not) {
        const std::lock_guard lock(mutex_);
        if (!able) std::printf("SKIPPED %s: %s\n", check, why_not);
        return able;
    }
    // Returns the exit status of the program.
    int finish() const {
        std::printf("%zu passed, %zu failed\n", passed_, failed_);
        return failed_ == 0 ? 0 : 1;
    }

  private:
    std::mutex mutex_;
    size_t passed_ = 0, failed_ = 0;
};

}  // namespace unisono::test
