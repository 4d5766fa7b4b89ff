// Compiling a region for an instruction set without flags for the whole file: functions between
// MOEFLUX_TARGET_BEGIN("..") and MOEFLUX_TARGET_END may use it. Headers with code of their own must be
// included before, so that none of their functions is compiled for it.
#pragma once

#define MOEFLUX_PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define MOEFLUX_TARGET_BEGIN(isa) MOEFLUX_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define MOEFLUX_TARGET_END MOEFLUX_PRAGMA(clang attribute pop)
#else
#define MOEFLUX_TARGET_BEGIN(isa) MOEFLUX_PRAGMA(GCC push_options) MOEFLUX_PRAGMA(GCC target(isa))
#define MOEFLUX_TARGET_END MOEFLUX_PRAGMA(GCC pop_options)
#endif
