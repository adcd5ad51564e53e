#pragma once

#include <memory>

#include "transport/tls_session.h"

namespace unisono::bind {

// A session as Python holds it, until it goes with its socket to a group.
struct TlsEnd {
    std::unique_ptr<TlsSession> session;
    [[nodiscard]] TlsSession& get() const;
};

}  // namespace unisono::bind
