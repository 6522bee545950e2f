// OPKIT_UNROLL, before a loop of a constant number of turns: all of them are written out.
#pragma once

#if defined(__clang__)
#define OPKIT_UNROLL _Pragma("clang loop unroll(full)")
#else
#define OPKIT_UNROLL _Pragma("GCC unroll 32")
#endif
