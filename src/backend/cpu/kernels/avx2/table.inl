// All kernels of a table for AVX2, with AVX-VNNI or without.
// clang-format off: the order is a dependency
#include "backend/cpu/kernels/generic/math.inl"
#include "backend/cpu/kernels/generic/elementwise.inl"
#include "backend/cpu/kernels/generic/matmul.inl"
#include "backend/cpu/kernels/generic/head_matmul.inl"
#include "backend/cpu/kernels/generic/attention.inl"
#include "backend/cpu/kernels/generic/delta.inl"
#include "backend/cpu/kernels/generic/table.inl"
#include "backend/cpu/kernels/generic/codes32.inl"
#include "backend/cpu/kernels/avx2/bytes.inl"
#include "backend/cpu/kernels/avx2/registers.inl"
#include "backend/cpu/kernels/generic/attention_heads.inl"
#include "backend/cpu/kernels/generic/delta_lanes.inl"
#include "backend/cpu/kernels/generic/delta_rows.inl"
#include "backend/cpu/kernels/generic/ahead.inl"
#include "backend/cpu/kernels/generic/panel_ahead.inl"
#include "backend/cpu/kernels/generic/panels.inl"
#include "backend/cpu/kernels/generic/bands.inl"
#include "backend/cpu/kernels/generic/exact.inl"
#include "backend/cpu/kernels/avx2/linear.inl"
// clang-format on

namespace {

constexpr KernelTable avx2_kernels() {
  KernelTable t = with_exact(kPanelTable);
  t.fast[3] = matmul_nibbles<3>;
  return with_bands<matmul_nibbles<6>>(t);
}
constexpr KernelTable kAvx2Table = avx2_kernels();

}  // namespace
