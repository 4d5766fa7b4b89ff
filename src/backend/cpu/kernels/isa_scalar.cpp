// The kernels compiled for any CPU: plain C++.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "backend/cpu/kernels/kernel_table.h"
#include "backend/cpu/kernels/target.h"
#include "backend/ops.h"
#include "core/float_bits.h"
#include "core/scalar_math.h"
#include "quant/codes.h"

#define MOEFLUX_ISA scalar
#define MOEFLUX_ISA_NAME "scalar"


#include "backend/cpu/kernels/simd_scalar.h"

namespace moeflux::backend::cpu::scalar {
// clang-format off: the order is a dependency
#include "backend/cpu/kernels/generic/math.inl"
#include "backend/cpu/kernels/generic/elementwise.inl"
#include "backend/cpu/kernels/generic/matmul.inl"
#include "backend/cpu/kernels/generic/head_matmul.inl"
#include "backend/cpu/kernels/generic/attention.inl"
#include "backend/cpu/kernels/generic/delta.inl"
#include "backend/cpu/kernels/generic/table.inl"
// clang-format on
}  // namespace moeflux::backend::cpu::scalar


namespace moeflux::backend::cpu {
const KernelTable* scalar_table() noexcept { return &scalar::kTable; }
}  // namespace moeflux::backend::cpu

