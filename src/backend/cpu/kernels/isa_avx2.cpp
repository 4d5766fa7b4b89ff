// The kernels compiled for AVX2, FMA and F16C.
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "backend/cpu/kernels/kernel_table.h"
#include "backend/cpu/kernels/target.h"
#include "backend/ops.h"
#include "core/float_bits.h"
#include "core/scalar_math.h"
#include "quant/codes.h"

#define MOEFLUX_ISA avx2
#define MOEFLUX_ISA_NAME "avx2"

#if defined(__x86_64__)

MOEFLUX_TARGET_BEGIN("avx2,fma,f16c")
#include "backend/cpu/kernels/simd_avx2.h"

namespace moeflux::backend::cpu::avx2 {
// clang-format off: the order is a dependency
#include "backend/cpu/kernels/generic/math.inl"
#include "backend/cpu/kernels/generic/elementwise.inl"
#include "backend/cpu/kernels/generic/matmul.inl"
#include "backend/cpu/kernels/generic/head_matmul.inl"
#include "backend/cpu/kernels/generic/attention.inl"
#include "backend/cpu/kernels/generic/delta.inl"
#include "backend/cpu/kernels/generic/table.inl"
#include "backend/cpu/kernels/avx2/bytes.inl"
#include "backend/cpu/kernels/generic/panels.inl"
// clang-format on
}  // namespace moeflux::backend::cpu::avx2

MOEFLUX_TARGET_END
namespace moeflux::backend::cpu {
const KernelTable* avx2_table() noexcept {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &avx2::kPanelTable : nullptr;
}
}  // namespace moeflux::backend::cpu

#else

namespace moeflux::backend::cpu {
const KernelTable* avx2_table() noexcept { return nullptr; }
}  // namespace moeflux::backend::cpu

#endif
