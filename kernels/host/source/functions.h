/* Functions of numbers, by the same instructions in every lane of a vector. */
#pragma once

#include <math.h>

#include "host.h"
#include "vectors.h"

/* exp(x) for x <= 0, as Cephes computes it; 0 where the result would be denormal, and NaN of NaN:
   `most` returns its second argument if they cannot be compared. */
INLINE vf exponential(vf x) {
    vi vanishes = (vi)(x < all(-87.33654f));
    x = most(all(-87.33654f), x);
    /* Adding and subtracting 1.5 * 2^23 rounds to the nearest integer. */
    vf turns = fma_of(x, all(1.44269504088896341f), all(12582912.0f)) - all(12582912.0f);
    vf rest = fma_of(turns, all(-0.693359375f), x);
    rest = fma_of(turns, all(2.12194440e-4f), rest);
    vf sum = all(1.9875691500e-4f);
    sum = fma_of(sum, rest, all(1.3981999507e-3f));
    sum = fma_of(sum, rest, all(8.3334519073e-3f));
    sum = fma_of(sum, rest, all(4.1665795894e-2f));
    sum = fma_of(sum, rest, all(1.6666665459e-1f));
    sum = fma_of(sum, rest, all(5.0000001201e-1f));
    sum = fma_of(sum, rest * rest, rest) + all(1);
    vi power = __builtin_convertvector(turns, vi) + 127;
    return (vf)(~vanishes & (vi)(sum * (vf)(power << 23)));
}

INLINE vf size_of_each(vf x) { return (vf)((vi)x & 0x7fffffff); }

INLINE vf sigmoid_of(vf x) {
    vf power = exponential(-size_of_each(x));
    return choose((vi)(x >= all(0)), all(1), power) / (all(1) + power);
}

/* As Cephes computes it. */
INLINE vf tanh_of(vf x) {
    vf size = size_of_each(x), square = x * x;
    vf sum = fma_of(square, all(-5.70498872745e-3f), all(2.06390887954e-2f));
    sum = fma_of(sum, square, all(-5.37397155531e-2f));
    sum = fma_of(sum, square, all(1.33314422036e-1f));
    sum = fma_of(sum, square, all(-3.33332819422e-1f));
    vf small = fma_of(sum * square, x, x);
    vf power = exponential(size * all(-2));
    vf large = (all(1) - power) / (all(1) + power);
    large = (vf)((vi)large | ((vi)x & (vi)all(-0.0f)));
    return choose((vi)(size < all(0.625f)), small, large);
}

INLINE vf softplus_of(vf x) {
    for (int i = 0; i < W; i++)
        if (!(x[i] > 20)) x[i] = log1pf(expf(x[i]));
    return x;
}

INLINE vf mapped(int64_t operation, vf x) {
    switch (operation) {
    case MAP_SIGMOID: return sigmoid_of(x);
    case MAP_SILU: return x * sigmoid_of(x);
    case MAP_TANH: return tanh_of(x);
    case MAP_GELU: {
        vf inner = (x + x * x * x * all(0.044715f)) * all(0.7978845608028654f);
        return x * all(0.5f) * (all(1) + tanh_of(inner));
    }
    default: return softplus_of(x);
    }
}
