#if defined(__x86_64__)
#include "targets.h"
TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#define AVX512
#define NAME avx512
#define RUNS_HERE                                                                   \
    (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&            \
     __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&   \
     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
#include "make.h"
TARGET_END
#endif
