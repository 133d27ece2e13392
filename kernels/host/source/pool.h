/* Threads that help the one that calls. */
#pragma once

/* caller: 0 for the thread that called, else the number of the helper */
typedef void (*Function)(void *data, int caller);

/* Runs a function in this thread and, as soon as they come, in up to `helpers` others, and returns
   when none of them is in it any more. All share its work: what is left when one returns is only
   what others are in the middle of. A helper may run it twice. */
void with_help(Function function, void *data, int helpers);

/* Tells the processor that this thread asks for something again and again. */
static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}
