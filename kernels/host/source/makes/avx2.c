#if defined(__x86_64__)
#include "targets.h"
TARGET_BEGIN("avx2,fma,f16c")
#define AVX2
#define NAME avx2
/* Every processor with AVX2 converts half precision (F16C), which not every compiler can ask for. */
#define RUNS_HERE (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#include "make.h"
TARGET_END
#endif
