// Tests the functions of Open MPI that MLX calls: every type and operator beside a plain loop, the
// operators of 16-bit floats that MLX makes itself, and messages.
#include <algorithm>
#include <complex>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "mpi/communicator.h"
#include "mpi/open_mpi_operators.h"
#include "tests/handed_groups.h"
#include "tests/oracle.h"
#include "tests/report.h"

extern "C" {
extern const char ompi_mpi_c_bool, ompi_mpi_int8_t, ompi_mpi_uint8_t, ompi_mpi_int16_t,
    ompi_mpi_uint16_t, ompi_mpi_int32_t, ompi_mpi_uint32_t, ompi_mpi_int64_t, ompi_mpi_uint64_t,
    ompi_mpi_float, ompi_mpi_double, ompi_mpi_c_complex;
extern const char ompi_mpi_op_sum, ompi_mpi_op_max, ompi_mpi_op_min;
int MPI_Comm_rank(void* comm, int* rank);
int MPI_Comm_size(void* comm, int* size);
int MPI_Allreduce(const void* in, void* out, int count, const void* type, const void* op,
                  void* comm);
int MPI_Allgather(const void* in, int count, const void* type, void* out, int, const void*,
                  void* comm);
int MPI_Send(const void* data, int count, const void* type, int to, int tag, void* comm);
int MPI_Recv(void* data, int count, const void* type, int from, int tag, void* comm, void*);
int MPI_Type_contiguous(int count, const void* type, const void** made);
int MPI_Op_create(unisono::mpi::UserFunction function, int, const void** made);
}

namespace {

using namespace unisono;
using namespace unisono::test;
using Half = oracle::Narrow<uint16_t, 10>;
using Brain = oracle::Narrow<uint16_t, 7>;

constexpr uint32_t kRanks = 3;
constexpr int kCounts[] = {1, 1000};
const void* const kInPlace = reinterpret_cast<const void*>(uintptr_t{1});

struct Truth {  // std::vector<bool> has no array
    bool value;
};

enum class Op : uint8_t { sum, max, min, product };

template <class T>
T made(double value) {
    if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, Brain>) {
        return T::rounded(static_cast<float>(value));
    } else if constexpr (std::is_same_v<T, std::complex<float>>) {
        return {static_cast<float>(value), static_cast<float>(-value)};
    } else if constexpr (std::is_same_v<T, Truth>) {
        return {value != 0};
    } else {
        return static_cast<T>(value);
    }
}

template <class T>
T combined(Op op, T in, T both) {
    if constexpr (std::is_same_v<T, std::complex<float>>) {
        return in + both;
    } else if constexpr (std::is_same_v<T, Truth>) {
        return {op == Op::min ? in.value && both.value : in.value || both.value};
    } else if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, Brain>) {
        const float x = in.widened(), y = both.widened();
        if (op == Op::sum) return T::rounded(x + y);
        if (op == Op::product) return T::rounded(x * y);
        return (op == Op::max ? x > y : x < y) ? in : both;
    } else {
        if (op == Op::sum) return static_cast<T>(in + both);
        return op == Op::max ? std::max(in, both) : std::min(in, both);
    }
}

// Has the type of MPI's user functions, as MLX's own operators do.
template <class T, Op op>
void user_function(void* in, void* both, int* count, void**) {
    const auto* x = static_cast<const T*>(in);
    auto* y = static_cast<T*>(both);
    for (int i = 0; i < *count; ++i) y[i] = combined(op, x[i], y[i]);
}

// Small numbers, some of which are zero, whose sums and products are exact in all types.
double value_of(uint32_t rank, size_t i) {
    return static_cast<double>((rank * 7 + i * 3) % 5);
}

template <class T>
bool same_bytes(const std::vector<T>& x, const std::vector<T>& y) {
    return std::memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0;
}

// One rank with its communicator.
struct Tester {
    Report& report;
    uint32_t rank;
    void* comm;

    template <class T>
    std::vector<T> values(uint32_t of, int count) const {
        std::vector<T> x;
        for (size_t i = 0; i < static_cast<size_t>(count); ++i)
            x.push_back(made<T>(value_of(of, i)));
        return x;
    }

    template <class T>
    void reduces(const void* type, const void* op, Op how, const std::string& what) const {
        for (const int count : kCounts) {
            auto expected = values<T>(0, count);
            for (uint32_t other = 1; other < kRanks; ++other) {
                auto x = values<T>(other, count);
                for (size_t i = 0; i < x.size(); ++i)
                    expected[i] = combined(how, x[i], expected[i]);
            }
            auto in = values<T>(rank, count);
            std::vector<T> out(in.size());
            bool right = MPI_Allreduce(in.data(), out.data(), count, type, op, comm) == 0;
            right = right && same_bytes(out, expected);
            right = right && MPI_Allreduce(kInPlace, in.data(), count, type, op, comm) == 0;
            report.check(right && same_bytes(in, expected), what);
        }
    }

    template <class T>
    void gathers(const void* type, const std::string& what) const {
        constexpr int count = 300;
        std::vector<T> expected, out(kRanks * count);
        for (uint32_t other = 0; other < kRanks; ++other)
            for (const T x : values<T>(other, count)) expected.push_back(x);
        const auto in = values<T>(rank, count);
        const int code = MPI_Allgather(in.data(), count, type, out.data(), count, type, comm);
        report.check(code == 0 && same_bytes(out, expected), what + ", gathered");
    }

    template <class T>
    void all(const void* type, const std::string& name) const {
        reduces<T>(type, &ompi_mpi_op_sum, Op::sum, name + ", sum");
        if constexpr (!std::is_same_v<T, std::complex<float>>) {
            reduces<T>(type, &ompi_mpi_op_max, Op::max, name + ", max");
            reduces<T>(type, &ompi_mpi_op_min, Op::min, name + ", min");
        }
        gathers<T>(type, name);
    }

    void sends() const {
        const int right = static_cast<int>((rank + 1) % kRanks);
        const int left = static_cast<int>((rank + kRanks - 1) % kRanks);
        for (const int count : {1, 5000}) {
            const std::vector<double> sent(static_cast<size_t>(count), rank);
            std::vector<double> got(sent.size(), -1);
            const auto send = [&] {
                return MPI_Send(sent.data(), count, &ompi_mpi_double, right, 3, comm);
            };
            const auto receive = [&] {
                return MPI_Recv(got.data(), count, &ompi_mpi_double, left, -1, comm, nullptr);
            };
            const int code = rank ? receive() + send() : send() + receive();
            report.check(code == 0 && got == std::vector<double>(sent.size(), left), "a message");
        }
    }
};

// The types and operators that MLX makes, once for all threads.
struct MadeByMlx {
    const void *half, *brain;
    const void *operators[2][3], *product;

    MadeByMlx() {
        MPI_Type_contiguous(2, &ompi_mpi_uint8_t, &half);
        MPI_Type_contiguous(2, &ompi_mpi_uint8_t, &brain);
        MPI_Op_create(user_function<Half, Op::sum>, 1, &operators[0][0]);
        MPI_Op_create(user_function<Half, Op::max>, 1, &operators[0][1]);
        MPI_Op_create(user_function<Half, Op::min>, 1, &operators[0][2]);
        MPI_Op_create(user_function<Brain, Op::sum>, 1, &operators[1][0]);
        MPI_Op_create(user_function<Brain, Op::max>, 1, &operators[1][1]);
        MPI_Op_create(user_function<Brain, Op::min>, 1, &operators[1][2]);
        MPI_Op_create(user_function<Half, Op::product>, 1, &product);
    }
};

void check_made(const Tester& tester, const MadeByMlx& mlx) {
    constexpr Op kOps[] = {Op::sum, Op::max, Op::min};
    for (size_t which = 0; which < std::size(kOps); ++which) {
        tester.reduces<Half>(mlx.half, mlx.operators[0][which], kOps[which], "float16");
        tester.reduces<Brain>(mlx.brain, mlx.operators[1][which], kOps[which], "bfloat16");
    }
    tester.reduces<Half>(mlx.half, mlx.product, Op::product, "an operator that MLX may add");
    tester.gathers<Brain>(mlx.brain, "bfloat16");
}

void check_recognition(Report& report) {
    using mpi::recognised, mpi::Reduction;
    report.check(
        recognised(user_function<Half, Op::sum>) == Reduction{UNISONO_FLOAT16, UNISONO_SUM} &&
            recognised(user_function<Brain, Op::max>) == Reduction{UNISONO_BFLOAT16, UNISONO_MAX} &&
            recognised(user_function<Half, Op::min>) == Reduction{UNISONO_FLOAT16, UNISONO_MIN},
        "MLX's operators are recognised");
    report.check(!recognised(user_function<Half, Op::product>) &&
                     !recognised(user_function<float, Op::sum>) &&
                     !recognised(user_function<int16_t, Op::max>),
                 "others are not");
}

void check_rank(const Tester& tester) {
    int rank = -1, size = -1;
    MPI_Comm_rank(tester.comm, &rank);
    MPI_Comm_size(tester.comm, &size);
    tester.report.check(rank == static_cast<int>(tester.rank) && size == kRanks, "rank and size");
    tester.all<Truth>(&ompi_mpi_c_bool, "bool");
    tester.all<int8_t>(&ompi_mpi_int8_t, "int8");
    tester.all<uint8_t>(&ompi_mpi_uint8_t, "uint8");
    tester.all<int16_t>(&ompi_mpi_int16_t, "int16");
    tester.all<uint16_t>(&ompi_mpi_uint16_t, "uint16");
    tester.all<int32_t>(&ompi_mpi_int32_t, "int32");
    tester.all<uint32_t>(&ompi_mpi_uint32_t, "uint32");
    tester.all<int64_t>(&ompi_mpi_int64_t, "int64");
    tester.all<uint64_t>(&ompi_mpi_uint64_t, "uint64");
    tester.all<float>(&ompi_mpi_float, "float32");
    tester.all<double>(&ompi_mpi_double, "float64");
    tester.all<std::complex<float>>(&ompi_mpi_c_complex, "complex64");
    tester.sends();
}

}  // namespace

int main() {
    Report report;
    const MadeByMlx mlx;
    check_recognition(report);
    World world(shape_of(kRanks, 2), Mapping::own, kRanks);
    world.run([&](Rank& rank) {
        mpi::Communicator comm(handed_group(rank), kLong_s);
        const Tester tester{report, rank.rank, &comm};
        check_rank(tester);
        check_made(tester, mlx);
    });
    return report.finish();
}
