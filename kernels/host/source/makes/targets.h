/* Compiles what follows for a make of vector units, whatever the rest is compiled for. */
#pragma once

#define PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define TARGET_BEGIN(names) \
    PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define TARGET_END _Pragma("clang attribute pop")
#else
#define TARGET_BEGIN(names) _Pragma("GCC push_options") PRAGMA(GCC target(names))
#define TARGET_END _Pragma("GCC pop_options")
#endif
