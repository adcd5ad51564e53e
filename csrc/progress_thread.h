// Threads of the library's own.
#pragma once

#include <csignal>
#include <exception>
#include <thread>
#include <utility>

namespace unisono {

// Runs `loop` in a thread that leaves signals to the threads of the program. If no thread is to be
// had, there is none: whoever waits for the work does it.
template <class Loop>
void start_progress(std::thread& thread, Loop loop) {
    try {
        thread = std::thread([loop = std::move(loop)] {
            sigset_t all;
            sigfillset(&all);
            pthread_sigmask(SIG_SETMASK, &all, nullptr);
            loop();
        });
    } catch (const std::exception&) {  // no thread, or no memory for what the library keeps of it
        return;
    }
}

}  // namespace unisono
