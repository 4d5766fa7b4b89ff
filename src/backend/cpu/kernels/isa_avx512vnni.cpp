// The kernels compiled for AVX-512 with VNNI: the integer kernels of kernels/avx512.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "backend/cpu/kernels/kernel_table.h"
#include "backend/cpu/kernels/target.h"
#include "backend/ops.h"
#include "core/float_bits.h"
#include "core/scalar_math.h"
#include "quant/codes.h"

#define MOEFLUX_ISA avx512vnni
#define MOEFLUX_ISA_NAME "avx512vnni"

#if defined(__x86_64__)

MOEFLUX_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#include "backend/cpu/kernels/simd_avx512.h"

namespace moeflux::backend::cpu::avx512vnni {
// clang-format off: the order is a dependency
#include "backend/cpu/kernels/generic/math.inl"
#include "backend/cpu/kernels/generic/elementwise.inl"
#include "backend/cpu/kernels/generic/matmul.inl"
#include "backend/cpu/kernels/generic/head_matmul.inl"
#include "backend/cpu/kernels/generic/attention.inl"
#include "backend/cpu/kernels/generic/delta.inl"
#include "backend/cpu/kernels/generic/table.inl"
#include "backend/cpu/kernels/avx512/codes_words.inl"
#include "backend/cpu/kernels/avx512/tiles.inl"
#include "backend/cpu/kernels/avx512/matvec.inl"
#include "backend/cpu/kernels/generic/ahead.inl"
#include "backend/cpu/kernels/avx512/linear.inl"
#include "backend/cpu/kernels/avx512/bands.inl"
#include "backend/cpu/kernels/generic/panel_ahead.inl"
#include "backend/cpu/kernels/avx512/gemm.inl"
#include "backend/cpu/kernels/avx512/fp8.inl"
#include "backend/cpu/kernels/avx512/exact.inl"
#include "backend/cpu/kernels/avx512/attention.inl"
#include "backend/cpu/kernels/avx512/attention_tokens.inl"
#include "backend/cpu/kernels/avx512/delta.inl"
#include "backend/cpu/kernels/generic/delta_rows.inl"
// clang-format on

namespace {

constexpr KernelTable tiled_table() {
  KernelTable t = kTable;
  constexpr int kTiledSlots = 10;  // all but fp8, which has no fast kernel
  const MatMulFn fast[kTiledSlots] = {nullptr, nullptr, nullptr, matmul_fast_tiles<3>, matmul_fast_tiles<4>,
                                       matmul_fast_tiles<5>, matmul_fast_tiles<6>, matmul_fast_tiles<7>,
                                       matmul_fast_tiles<8>, matmul_fast_tiles<9>};
  const MatMulFn exact[kTiledSlots] = {matmul_exact_tiles<0>, matmul_exact_tiles<1>, matmul_exact_tiles<2>,
                                        matmul_exact_tiles<3>, matmul_exact_tiles<4>, matmul_exact_tiles<5>,
                                        matmul_exact_tiles<6>, matmul_exact_tiles<7>, matmul_exact_tiles<8>,
                                        matmul_exact_tiles<9>};
  for (int i = 0; i < kTiledSlots; ++i) t.fast[i] = fast[i], t.exact[i] = exact[i];
  t.exact[10] = matmul_exact_tiles<10>;
  t.quantize_row = quantize_row_tiles;
  t.token_tile = token_tile;
  t.interleave = interleave_tokens;
  t.bands = true;
  t.attention_heads = attention_heads;
  t.attention_tile = attention_tile;
  t.delta_columns = delta_columns_tiles;
  return t;
}
constexpr KernelTable kTiledTable = tiled_table();

}  // namespace
}  // namespace moeflux::backend::cpu::avx512vnni

MOEFLUX_TARGET_END
namespace moeflux::backend::cpu {
const KernelTable* avx512vnni_table() noexcept {
  return avx512_table() != nullptr && __builtin_cpu_supports("avx512vnni") ? &avx512vnni::kTiledTable : nullptr;
}
}  // namespace moeflux::backend::cpu

#else

namespace moeflux::backend::cpu {
const KernelTable* avx512vnni_table() noexcept { return nullptr; }
}  // namespace moeflux::backend::cpu

#endif
