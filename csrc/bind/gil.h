// The GIL, given and taken by threads that may still be in a call when the interpreter ends.
//
// Before Python 3.14 a thread that asks for the GIL after that is ended by unwinding its stack, and
// where this meets a destructor C++ ends the process with SIGABRT. So it sleeps for the little
// while that the process still lives, as it does from 3.14 on.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

namespace unisono::bind {

template <class Ask>
auto sleeping_at_the_end(Ask&& ask) noexcept {
    try {
        return ask();
    } catch (...) {  // the unwinding, which must not go on from here
        for (;;) ::pause();
    }
}

// Gives the GIL away for as long as it lives.
class WithoutGil {
  public:
    WithoutGil() noexcept : state_(PyEval_SaveThread()) {}
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;
    ~WithoutGil() {
        sleeping_at_the_end([this] { PyEval_RestoreThread(state_); });
    }

  private:
    PyThreadState* state_;
};

// Has the GIL for as long as it lives, in any thread.
class WithGil {
  public:
    WithGil() noexcept : state_(sleeping_at_the_end([] { return PyGILState_Ensure(); })) {}
    WithGil(const WithGil&) = delete;
    WithGil& operator=(const WithGil&) = delete;
    ~WithGil() { PyGILState_Release(state_); }

  private:
    PyGILState_STATE state_;
};

}  // namespace unisono::bind
