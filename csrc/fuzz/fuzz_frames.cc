#include "fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    unisono::fuzz::feed_frames(data, size);
    return 0;
}
