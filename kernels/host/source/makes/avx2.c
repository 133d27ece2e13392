#if defined(__x86_64__)
#include "targets.h"
TARGET_BEGIN("avx2,fma,f16c")
#define AVX2
#define NAME avx2
#define RUNS_HERE                                                         \
    (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && \
     __builtin_cpu_supports("f16c"))
#include "make.h"
TARGET_END
#endif
