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
#include "backend/cpu/kernels/avx2/table.inl"
}  // namespace moeflux::backend::cpu::avx2

MOEFLUX_TARGET_END
namespace moeflux::backend::cpu {
const KernelTable* avx2_table() noexcept {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &avx2::kAvx2Table : nullptr;
}
}  // namespace moeflux::backend::cpu

#else

namespace moeflux::backend::cpu {
const KernelTable* avx2_table() noexcept { return nullptr; }
}  // namespace moeflux::backend::cpu

#endif
