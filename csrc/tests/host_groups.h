// Groups whose ranks are threads of this process on simulated hosts. Ranks of different hosts share
// only connections.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <utility>
#include <vector>

#include "tests/world.h"

namespace unisono::test {

using Layout = std::vector<std::vector<uint32_t>>;  // ranks of each host

// Returns both ends of a connection: TCP over loopback with TCP_NODELAY, as the connection manager
// passes them.
inline std::pair<Descriptor, Descriptor> connection() {
    const Descriptor listener(::socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const to = reinterpret_cast<sockaddr*>(&address);
    if (::bind(listener.get(), to, size) != 0 || ::listen(listener.get(), 1) != 0 ||
        ::getsockname(listener.get(), to, &size) != 0) {
        throw_errno("listening on loopback");
    }
    Descriptor dialed(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::connect(dialed.get(), to, size) != 0) throw_errno("connecting over loopback");
    Descriptor accepted(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (accepted.get() < 0) throw_errno("accepting over loopback");
    const int on = 1;
    for (const int fd : {dialed.get(), accepted.get()})
        ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    return {std::move(dialed), std::move(accepted)};
}

inline void set_nonblocking(const Descriptor& fd) {
    ::fcntl(fd.get(), F_SETFL, ::fcntl(fd.get(), F_GETFL) | O_NONBLOCK);
}

inline constexpr std::array kTransports{TransportKind::collectives, TransportKind::p2p};

class Hosts {
  public:
    Hosts(const Layout& layout, uint32_t streams, uint64_t buffer_bytes = 1 << 16,
          uint32_t depth = 2, uint32_t cores = 1, uint64_t heap_bytes = 0) {
        size_t ranks = 0;
        for (const auto& here : layout) ranks += here.size();
        groups_.resize(ranks);
        std::vector<size_t> host(ranks);
        for (size_t h = 0; h < layout.size(); ++h) {
            const auto& here = layout[h];
            const Descriptor fd(create_segment(
                {static_cast<uint32_t>(here.size()), depth, buffer_bytes, 2, 256, heap_bytes},
                World::nonce));
            for (const uint32_t r : here) {
                host[r] = h;
                groups_[r] = std::make_shared<Group>(Descriptor(::dup(fd.get())), r,
                                                     HostRanks{static_cast<uint32_t>(ranks), here},
                                                     World::nonce, cores);
            }
        }
        for (uint32_t a = 0; a < ranks; ++a) {
            for (uint32_t b = 0; b < a; ++b) {
                if (host[a] != host[b]) connect(a, b, streams);
            }
        }
        for (uint32_t r = 0; r < ranks; ++r) ranks_.push_back(rank_of(groups_[r], r));
    }
    ~Hosts() {
        // Ranks close in parallel, because each rank waits briefly until the others have its last
        // frames.
        run([](Rank& rank) { rank.close(); });
    }

    Rank& operator[](uint32_t r) { return ranks_[r]; }
    Group& group(uint32_t r) { return *groups_[r]; }
    void run(const std::function<void(Rank&)>& body) {
        std::vector<std::thread> threads;
        for (Rank& rank : ranks_) threads.emplace_back([&body, &rank] { body(rank); });
        for (std::thread& thread : threads) thread.join();
    }

  private:
    void connect(uint32_t a, uint32_t b, uint32_t streams) {
        for (const TransportKind kind : kTransports) {
            for (uint32_t s = 0; s < streams; ++s) {
                auto [one, other] = connection();
                set_nonblocking(one);
                groups_[a]->attach(b, kind, s, streams, std::move(one));
                groups_[b]->attach(a, kind, s, streams, std::move(other));
            }
        }
    }

    std::vector<std::shared_ptr<Group>> groups_;
    std::vector<Rank> ranks_;
};

}  // namespace unisono::test
