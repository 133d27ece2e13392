/* Threads that help the one that calls. */
#pragma once

typedef void (*Function)(void *data);

/* Runs a function in this thread and, as they come, in up to `helpers` others. Returns when no thread
   is in it any more. It must be one that any number of threads may run together, and must have done
   everything when it returns in one of them, but for what others are in the middle of. */
void with_help(Function function, void *data, int helpers);
