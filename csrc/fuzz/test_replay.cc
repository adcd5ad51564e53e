// Replays the fuzzers' corpus, with any compiler. Each file of the corpus reached new code when the
// fuzzer found it.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz/fuzz.h"
#include "tests/report.h"

namespace {

using Feed = void (*)(const uint8_t*, size_t);

void replay(unisono::test::Report& report, const std::filesystem::path& folder, Feed feed) {
    size_t files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
        std::ifstream file(entry.path(), std::ios::binary);
        const std::vector<char> data{std::istreambuf_iterator<char>(file), {}};
        feed(reinterpret_cast<const uint8_t*>(data.data()), data.size());
        ++files;
    }
    report.check(files > 0, "nothing is kept in " + folder.string());
}

}  // namespace

int main(int, char** arguments) {
    unisono::test::Report report;
    const std::filesystem::path corpus(arguments[1]);
    replay(report, corpus / "frames", unisono::fuzz::feed_frames);
    replay(report, corpus / "messages", unisono::fuzz::feed_messages);
    replay(report, corpus / "plans", unisono::fuzz::feed_plans);
    return report.finish();
}
