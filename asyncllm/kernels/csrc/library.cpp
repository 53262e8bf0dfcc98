// Who this library is: version, what it was built for, and what the machine can run.
#include "asyncllm_kernels.h"
#include "simd.h"

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
    __builtin_cpu_init();
    bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    uint32_t a, b, c, d;
    asm("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(1), "c"(0));
    v3 = v3 && (c >> 29 & 1);  // F16C, which not every compiler has a name for
    bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd");
    return v4 ? "x86-64-v4" : v3 ? "x86-64-v3" : "generic";
#else
    return allm_isa();
#endif
}
