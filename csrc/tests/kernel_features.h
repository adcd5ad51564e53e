// Features of the operating system's kernel that some tests need and some kernels or emulators
// lack.
#pragma once

#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/report.h"

namespace unisono::test {

// Returns true if a process can read another process's memory.
inline bool kernel_reads_peers() {
    int from = 1, to = 0;
    const iovec source{&from, sizeof(from)}, sink{&to, sizeof(to)};
    return ::process_vm_readv(::getpid(), &sink, 1, &source, 1, 0) == sizeof(to);
}

// Returns true if the kernel clears a page in a forked child. The library recognises a forked child
// by such a page. qemu-user accepts this madvise call, but ignores it.
inline bool forks_wipe_memory() {
    void* page = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ::madvise(page, 4096, MADV_WIPEONFORK);
    *static_cast<char*>(page) = 1;
    const pid_t child = ::fork();
    if (child == 0) ::_exit(*static_cast<char*>(page));
    int status = 0;
    ::waitpid(child, &status, 0);
    ::munmap(page, 4096);
    return status == 0;
}

inline bool can_run_single_copy(Report& report, const char* check) {
    return report.can_run(check, kernel_reads_peers(), "process_vm_readv does not work here");
}

inline bool can_wipe_on_fork(Report& report, const char* check) {
    return report.can_run(check, forks_wipe_memory(), "MADV_WIPEONFORK does not work here");
}

}  // namespace unisono::test
