// OPKIT_UNROLL, before a loop with a constant number of iterations: it is fully unrolled.
#pragma once

#if defined(__clang__)
#define OPKIT_UNROLL _Pragma("clang loop unroll(full)")
#else
#define OPKIT_UNROLL _Pragma("GCC unroll 32")
#endif
