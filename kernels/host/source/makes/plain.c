#define PLAIN
#define NAME plain
#define RUNS_HERE 1
#include "make.h"
