// The library's own threads.
#pragma once

#include <csignal>
#include <exception>
#include <thread>
#include <utility>

namespace unisono {

// Returns all signals except those that a thread causes itself, such as SIGSEGV. If such a signal
// were blocked, the kernel would end the process without the handler (faulthandler) that prints
// where the fault occurred.
inline sigset_t signals_of_others() noexcept {
    sigset_t set;
    sigfillset(&set);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS})
        sigdelset(&set, fault);
    return set;
}

// True in a progress thread. Such a thread must not wait for its own end.
inline thread_local bool in_progress_thread = false;

// Runs `loop` in a new thread that blocks signals, so that the program's threads receive them. If
// the thread cannot be created, the callers do the thread's work while they wait.
template <class Loop>
void start_progress(std::thread& thread, Loop loop) {
    try {
        thread = std::thread([loop = std::move(loop)] {
            const sigset_t blocked = signals_of_others();
            pthread_sigmask(SIG_SETMASK, &blocked, nullptr);
            in_progress_thread = true;
            loop();
        });
    } catch (const std::exception&) {  // no thread, or no memory for its state
        return;
    }
}

}  // namespace unisono
