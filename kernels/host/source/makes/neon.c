#if defined(__aarch64__)
#define NEON
#define NAME neon
#define RUNS_HERE 1
#include "make.h"
#endif
