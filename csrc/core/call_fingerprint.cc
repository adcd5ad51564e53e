#include "core/call_fingerprint.h"

namespace unisono {

namespace {

uint64_t mix(uint64_t h, uint64_t value) {  // splitmix64's finaliser
    h ^= value + 0x9e3779b97f4a7c15ULL + (h << 6) + (h >> 2);
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9ULL;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebULL;
    return h ^ (h >> 31);
}

}  // namespace

uint64_t fingerprint(const CallArgs& args) noexcept {
    uint64_t h = mix(0, kind_of(args) & 0xffffff);
    h = mix(h, static_cast<uint64_t>(static_cast<int64_t>(args.root)));
    h = mix(h, args.count);
    h = mix(h, args.extra);
    h = mix(h, static_cast<uint64_t>(args.dtype));
    return h & kHashMask;
}

}  // namespace unisono
