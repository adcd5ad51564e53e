// Release and acquisition of the GIL, for threads that may still be in a call at interpreter exit.
//
// Before Python 3.14, a thread that asks for the GIL after interpreter exit is ended by unwinding
// its stack. When the unwinding reaches a destructor, C++ ends the process with SIGABRT. So such a
// thread sleeps until the process ends, as Python itself does from 3.14 on.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

namespace unisono::bind {

template <class Ask>
auto sleeping_at_the_end(Ask&& ask) noexcept {
    try {
        return ask();
    } catch (...) {
        // The interpreter has ended and unwinds this thread's stack. The unwinding must not
        // continue.
        for (;;) ::pause();
    }
}

// Releases the GIL during the object's lifetime.
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

// Holds the GIL during the object's lifetime, in any thread.
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
