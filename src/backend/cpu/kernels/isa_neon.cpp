// The kernels compiled for NEON with dot products (ARMv8.2).
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "backend/cpu/kernels/kernel_table.h"
#include "backend/cpu/kernels/target.h"
#include "backend/ops.h"
#include "core/float_bits.h"
#include "core/scalar_math.h"
#include "quant/codes.h"

#define MOEFLUX_ISA neon
#define MOEFLUX_ISA_NAME "neon"

#if defined(__aarch64__)

// The C library's; its header is one of the operating system's.
extern "C" unsigned long getauxval(unsigned long type) noexcept;

MOEFLUX_TARGET_BEGIN("arch=armv8.2-a+dotprod")
#include "backend/cpu/kernels/simd_neon.h"

namespace moeflux::backend::cpu::neon {
// clang-format off: the order is a dependency
#include "backend/cpu/kernels/generic/math.inl"
#include "backend/cpu/kernels/generic/elementwise.inl"
#include "backend/cpu/kernels/generic/matmul.inl"
#include "backend/cpu/kernels/generic/head_matmul.inl"
#include "backend/cpu/kernels/generic/attention.inl"
#include "backend/cpu/kernels/generic/delta.inl"
#include "backend/cpu/kernels/generic/table.inl"
#include "backend/cpu/kernels/generic/codes32.inl"
#include "backend/cpu/kernels/neon/bytes.inl"
#include "backend/cpu/kernels/neon/registers.inl"
#include "backend/cpu/kernels/generic/attention_heads.inl"
#include "backend/cpu/kernels/generic/delta_lanes.inl"
#include "backend/cpu/kernels/generic/delta_rows.inl"
#include "backend/cpu/kernels/generic/ahead.inl"
#include "backend/cpu/kernels/generic/panel_ahead.inl"
#include "backend/cpu/kernels/generic/panels.inl"
#include "backend/cpu/kernels/generic/bands.inl"
#include "backend/cpu/kernels/generic/exact.inl"
// clang-format on

namespace {

constexpr KernelTable kNeonTable = with_bands<matmul_panels<6>>(with_exact(kPanelTable));

}  // namespace
}  // namespace moeflux::backend::cpu::neon

MOEFLUX_TARGET_END
namespace moeflux::backend::cpu {
const KernelTable* neon_table() noexcept {
  constexpr unsigned long kHwcap = 16, kDotProduct = 1ul << 20;  // AT_HWCAP, HWCAP_ASIMDDP
  return (getauxval(kHwcap) & kDotProduct) != 0 ? &neon::kNeonTable : nullptr;
}
}  // namespace moeflux::backend::cpu

#else

namespace moeflux::backend::cpu {
const KernelTable* neon_table() noexcept { return nullptr; }
}  // namespace moeflux::backend::cpu

#endif
