// Threads of the library's own.
#pragma once

#include <csignal>
#include <exception>
#include <thread>
#include <utility>

namespace unisono {

// All signals but those that a thread brings upon itself: where one of these is blocked, the kernel
// ends the process without asking its handler, which would have told where (faulthandler).
inline sigset_t signals_of_others() noexcept {
    sigset_t set;
    sigfillset(&set);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS})
        sigdelset(&set, fault);
    return set;
}

// Whether this thread is one of those: none may wait for its own end.
inline thread_local bool in_progress_thread = false;

// Runs `loop` in a thread that leaves signals to the threads of the program. If no thread is to be
// had, there is none: whoever waits for the work does it.
template <class Loop>
void start_progress(std::thread& thread, Loop loop) {
    try {
        thread = std::thread([loop = std::move(loop)] {
            const sigset_t blocked = signals_of_others();
            pthread_sigmask(SIG_SETMASK, &blocked, nullptr);
            in_progress_thread = true;
            loop();
        });
    } catch (const std::exception&) {  // no thread, or no memory for what the library keeps of it
        return;
    }
}

}  // namespace unisono
