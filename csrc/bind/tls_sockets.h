#pragma once

#include <memory>

#include "transport/tls_session.h"

namespace unisono::bind {

// A session owned by Python, until Python passes it with its socket to a group.
struct TlsEnd {
    std::unique_ptr<TlsSession> session;
    [[nodiscard]] TlsSession& get() const;
};

}  // namespace unisono::bind
