// Tests the functions of MPI that JAX calls: collectives of every type beside a plain loop,
// messages, the end of a communicator, and what a program sees after an error.
#include <algorithm>
#include <complex>
#include <cstdint>
#include <string>
#include <vector>

#include "mpi/comm_world.h"
#include "mpi/communicator.h"
#include "mpi/names.h"
#include "tests/handed_groups.h"
#include "tests/report.h"

extern "C" {
int MPIABI_Init_thread(int*, char***, int, int* provided);
int MPIABI_Comm_rank(MPIABI_Comm comm, int* rank);
int MPIABI_Comm_size(MPIABI_Comm comm, int* size);
int MPIABI_Comm_split(MPIABI_Comm comm, int color, int key, MPIABI_Comm* part);
int MPIABI_Comm_free(MPIABI_Comm* comm);
int MPIABI_Allreduce(const void* in, void* out, int count, MPIABI_Datatype type, MPIABI_Op op,
                     MPIABI_Comm comm);
int MPIABI_Allgather(const void* in, int count, MPIABI_Datatype type, void* out, int,
                     MPIABI_Datatype, MPIABI_Comm comm);
int MPIABI_Sendrecv(const void* out, int out_count, MPIABI_Datatype out_type, int to, int out_tag,
                    void* in, int in_count, MPIABI_Datatype in_type, int from, int in_tag,
                    MPIABI_Comm comm, MPIABI_Status*);
int MPIABI_Isend(const void* data, int count, MPIABI_Datatype type, int to, int tag,
                 MPIABI_Comm comm, MPIABI_Request* request);
int MPIABI_Irecv(void* data, int count, MPIABI_Datatype type, int from, int tag, MPIABI_Comm comm,
                 MPIABI_Request* request);
int MPIABI_Wait(MPIABI_Request* request, MPIABI_Status*);
int MPIABI_Error_string(int code, char* text, int* length);
void unisono_mpi_use(const unisono::mpi::Program* functions);
}

namespace {

using namespace unisono;
using namespace unisono::test;

constexpr uint32_t kRanks = 3;
constexpr int kCount = 700;

std::string text_of(int code) {
    char text[mpi::kMostText];
    int length = 0;
    MPIABI_Error_string(code, text, &length);
    return {text, static_cast<size_t>(length)};
}

MPIABI_Datatype type(uint32_t dtype) {
    return mpi::kFirstType + dtype;
}
MPIABI_Op op(uint32_t reduction) {
    return mpi::kFirstReduction + reduction;
}

// One rank with its communicator.
struct Tester {
    Report& report;
    uint32_t rank;
    MPIABI_Comm comm;

    void fails(int code, const std::string& part) const {
        const std::string text = text_of(code);
        report.check(code != 0 && text.find(part) != std::string::npos, part + ": " + text);
    }

    template <class T>
    static std::vector<T> values(uint32_t of) {
        std::vector<T> x;
        for (uint32_t i = 0; i < kCount; ++i) x.push_back(static_cast<T>((of * 7 + i * 3) % 5));
        return x;
    }

    template <class T, class Combine>
    void reduces(uint32_t dtype, uint32_t reduction, Combine combine) const {
        auto expected = values<T>(0);
        for (uint32_t other = 1; other < kRanks; ++other) {
            const auto x = values<T>(other);
            for (size_t i = 0; i < x.size(); ++i)
                expected[i] = static_cast<T>(combine(expected[i], x[i]));
        }
        const auto in = values<T>(rank);
        std::vector<T> out(in.size());
        const int code =
            MPIABI_Allreduce(in.data(), out.data(), kCount, type(dtype), op(reduction), comm);
        report.check(code == 0 && out == expected,
                     "type " + std::to_string(dtype) + ", reduction " + std::to_string(reduction));
    }

    template <class T>
    void all(uint32_t dtype) const {
        reduces<T>(dtype, UNISONO_SUM, [](T x, T y) { return x + y; });
        reduces<T>(dtype, UNISONO_PROD, [](T x, T y) { return x * y; });
        if constexpr (!std::is_same_v<T, std::complex<float>> &&
                      !std::is_same_v<T, std::complex<double>>) {
            reduces<T>(dtype, UNISONO_MIN, [](T x, T y) { return std::min(x, y); });
            reduces<T>(dtype, UNISONO_MAX, [](T x, T y) { return std::max(x, y); });
        }
        std::vector<T> expected, out(kRanks * kCount);
        for (uint32_t other = 0; other < kRanks; ++other)
            for (const T x : values<T>(other)) expected.push_back(x);
        const auto in = values<T>(rank);
        const int code =
            MPIABI_Allgather(in.data(), kCount, type(dtype), out.data(), kCount, type(dtype), comm);
        report.check(code == 0 && out == expected, "gathered " + std::to_string(dtype));
    }

    void all_types() const {
        all<int8_t>(UNISONO_INT8);
        all<uint8_t>(UNISONO_UINT8);
        all<int16_t>(UNISONO_INT16);
        all<uint16_t>(UNISONO_UINT16);
        all<int32_t>(UNISONO_INT32);
        all<uint32_t>(UNISONO_UINT32);
        all<int64_t>(UNISONO_INT64);
        all<uint64_t>(UNISONO_UINT64);
        all<float>(UNISONO_FLOAT32);
        all<double>(UNISONO_FLOAT64);
        all<std::complex<float>>(UNISONO_COMPLEX64);
        all<std::complex<double>>(UNISONO_COMPLEX128);
    }

    // Moves arrays around the ring, with both functions that JAX uses.
    void moves() const {
        const int right = static_cast<int>((rank + 1) % kRanks);
        const int left = static_cast<int>((rank + kRanks - 1) % kRanks);
        const auto real = type(UNISONO_FLOAT32);
        const auto sent = values<float>(rank);
        const auto expected = values<float>(static_cast<uint32_t>(left));
        std::vector<float> got(kCount), other(kCount);
        int code = MPIABI_Sendrecv(sent.data(), kCount, real, right, 0, got.data(), kCount, real,
                                   left, 0, comm, nullptr);
        report.check(code == 0 && got == expected, "exchanged");
        MPIABI_Request requests[2] = {};
        code = MPIABI_Irecv(other.data(), kCount, real, left, 1, comm, &requests[0]);
        code += MPIABI_Isend(sent.data(), kCount, real, right, 1, comm, &requests[1]);
        for (MPIABI_Request& request : requests) code += MPIABI_Wait(&request, nullptr);
        report.check(code == 0 && other == expected && requests[0] == mpi::kNullRequest, "moved");
        report.check(MPIABI_Wait(&requests[0], nullptr) == 0, "no request");
    }

    // A communicator that could not be made tells why in each call, since XLA ignores the split's
    // code.
    void tells_errors() const {
        float x = 1, y = 0;
        const auto real = type(UNISONO_FLOAT32);
        MPIABI_Comm part = mpi::kNullComm;
        fails(MPIABI_Comm_split(comm, 0, 0, &part), PlanOwner::kNoSplit);
        fails(MPIABI_Allreduce(&x, &y, 1, real, op(UNISONO_SUM), part), PlanOwner::kNoSplit);
        MPIABI_Request request = mpi::kNullRequest;
        fails(MPIABI_Isend(&x, 1, real, 0, 0, part, &request), PlanOwner::kNoSplit);
        report.check(MPIABI_Comm_free(&part) == 0 && part == mpi::kNullComm, "freed");
        fails(MPIABI_Allreduce(&x, &y, -1, real, op(UNISONO_SUM), comm), "2^31 - 1 elements");
        fails(MPIABI_Allreduce(&x, &y, 1, 0x1000, op(UNISONO_SUM), comm), "types and reductions");
        fails(MPIABI_Allreduce(&x, &y, 1, real, 0x1000, comm), "types and reductions");
        fails(MPIABI_Isend(&x, -1, real, 0, 0, comm, &request), "2^31 - 1 elements");
        fails(MPIABI_Isend(&x, 1, real, 99, 0, comm, &request), "expected a rank below 3");
    }
};

// After rank 0 has failed, all ranks get its reason.
void check_abort(Report& report) {
    World world(shape_of(kRanks, 2), Mapping::own, kRanks);
    world.run([&](Rank& rank) {
        unisono_group* const group = handed_group(rank);
        mpi::Communicator comm(group, kLong_s);
        const Tester tester{report, rank.rank, reinterpret_cast<MPIABI_Comm>(&comm)};
        if (rank.rank == 0) group->api->abort(group, "no space left");
        float x = 1, y = 0;
        tester.fails(MPIABI_Allreduce(&x, &y, 1, type(UNISONO_FLOAT32), op(UNISONO_SUM),
                                      reinterpret_cast<MPIABI_Comm>(&comm)),
                     "rank 0: no space left");
    });
}

// ---- the group of all processes

unisono_group* only_group = nullptr;

unisono_group* join(double* timeout_s, char* error, uint64_t size) {
    *timeout_s = kLong_s;
    if (!only_group) std::snprintf(error, size, "rank 1 is missing");
    return only_group;
}
int refuse(char* error, uint64_t size) {
    return std::snprintf(error, size, "two devices") > 0;
}

void check_world(Report& report) {
    const Tester tester{report, 0, mpi::kWorld};
    int provided = -1, number = -1;
    tester.fails(MPIABI_Comm_rank(mpi::kWorld, &number), "import unisono.jax before jax");
    const mpi::Program program{join, nullptr, nullptr}, refusing{join, refuse, nullptr};
    unisono_mpi_use(&program);
    tester.fails(MPIABI_Init_thread(nullptr, nullptr, 0, &provided), "rank 1 is missing");
    float x = 3, y = 0;
    const auto sum = [&] {
        return MPIABI_Allreduce(&x, &y, 1, type(UNISONO_FLOAT32), op(UNISONO_SUM), mpi::kWorld);
    };
    tester.fails(sum(), "rank 1 is missing");
    World alone(shape_of(1, 2), Mapping::own, 1);
    only_group = handed_group(alone[0]);
    report.check(MPIABI_Init_thread(nullptr, nullptr, 0, &provided) == 0, "joined");
    report.check(provided == mpi::kMultiple, "any thread may call");
    report.check(MPIABI_Comm_size(mpi::kWorld, &number) == 0 && number == 1, "one rank");
    report.check(sum() == 0 && y == 3, "a sum of one rank");
    unisono_mpi_use(&refusing);
    MPIABI_Comm part = mpi::kNullComm;
    tester.fails(MPIABI_Comm_split(mpi::kWorld, 0, 0, &part), "two devices");
    tester.fails(MPIABI_Allreduce(&x, &y, 1, type(UNISONO_FLOAT32), op(UNISONO_SUM), part),
                 "two devices");
    MPIABI_Comm_free(&part);
    delete mpi::world();
    mpi::set_world(nullptr);
    only_group->api->release(only_group);
}

}  // namespace

int main() {
    Report report;
    {
        World world(shape_of(kRanks, 2), Mapping::own, kRanks);
        world.run([&](Rank& rank) {
            mpi::Communicator comm(handed_group(rank), kLong_s);
            const Tester tester{report, rank.rank, reinterpret_cast<MPIABI_Comm>(&comm)};
            tester.all_types();
            tester.moves();
            tester.tells_errors();
        });
    }
    check_abort(report);
    check_world(report);
    return report.finish();
}
