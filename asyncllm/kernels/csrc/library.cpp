// Who this library is: version, what it was built for, and what the machine can run.
#include "asyncllm_kernels.h"
#include "simd.h"
#include "simd_integer.h"

namespace {

#if defined(__x86_64__)

struct Registers {
    uint32_t a, b, c, d;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf = 0) {
    Registers r;
    asm volatile("cpuid" : "=a"(r.a), "=b"(r.b), "=c"(r.c), "=d"(r.d) : "a"(leaf), "c"(subleaf));
    return r;
}

uint32_t enabled_state() {  // which registers the operating system saves: XCR0
    uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

bool all(uint32_t bits, uint32_t wanted) { return (bits & wanted) == wanted; }

// Asked here and not through __builtin_cpu_supports, which not every compiler's runtime answers the same way.
const char* best_isa() {
    constexpr uint32_t FMA = 1u << 12, MOVBE = 1u << 22, OSXSAVE = 1u << 27, AVX = 1u << 28, F16C = 1u << 29;
    constexpr uint32_t BMI1 = 1u << 3, AVX2 = 1u << 5, BMI2 = 1u << 8;
    constexpr uint32_t AVX512F = 1u << 16, AVX512DQ = 1u << 17, AVX512CD = 1u << 28, AVX512BW = 1u << 30, AVX512VL = 1u << 31;
    constexpr uint32_t YMM_STATE = 0x06, ZMM_STATE = 0xe6;
    if (cpuid(0).a < 7 || !all(cpuid(1).c, FMA | MOVBE | OSXSAVE | AVX | F16C)) return "generic";
    uint32_t features = cpuid(7).b, state = enabled_state();
    if (!all(features, BMI1 | AVX2 | BMI2) || !all(state, YMM_STATE)) return "generic";
    if (!all(features, AVX512F | AVX512DQ | AVX512CD | AVX512BW | AVX512VL) || !all(state, ZMM_STATE)) return "x86-64-v3";
    return "x86-64-v4";
}

// Of a machine that runs this build: AVX-512 VNNI for x86-64-v4, AVX-VNNI for x86-64-v3.
bool machine_has_fused_dot() {
#if ALLM_AVX512
    return cpuid(7).c >> 11 & 1;
#elif ALLM_AVX2
    return cpuid(7).a >= 1 && (cpuid(7, 1).a >> 4 & 1);
#else
    return false;
#endif
}

#else

bool machine_has_fused_dot() { return false; }

#endif

bool fused_dot = machine_has_fused_dot();

}  // namespace

namespace allm {

bool has_fused_dot() { return fused_dot; }

}  // namespace allm

int32_t allm_fused_dot(int32_t wanted) {
    if (wanted >= 0) fused_dot = wanted > 0 && machine_has_fused_dot();
    return fused_dot;
}

int32_t allm_abi_version(void) { return ALLM_ABI_VERSION; }

const char* allm_isa(void) {
#if ALLM_AVX512
    return "x86-64-v4";
#elif ALLM_AVX2
    return "x86-64-v3";
#elif defined(__aarch64__)
    return "neon";
#else
    return "generic";
#endif
}

const char* allm_best_isa(void) {
#if defined(__x86_64__)
    return best_isa();
#else
    return allm_isa();
#endif
}
