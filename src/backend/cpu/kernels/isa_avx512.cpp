// The kernels compiled for AVX-512 (F, BW, DQ, VL).
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

#define MOEFLUX_ISA avx512
#define MOEFLUX_ISA_NAME "avx512"

#if defined(__x86_64__)

MOEFLUX_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#include "backend/cpu/kernels/simd_avx512.h"

namespace moeflux::backend::cpu::avx512 {
// clang-format off: the order is a dependency
#include "backend/cpu/kernels/generic/math.inl"
#include "backend/cpu/kernels/generic/elementwise.inl"
#include "backend/cpu/kernels/generic/matmul.inl"
#include "backend/cpu/kernels/generic/head_matmul.inl"
#include "backend/cpu/kernels/generic/attention.inl"
#include "backend/cpu/kernels/generic/delta.inl"
#include "backend/cpu/kernels/generic/table.inl"
#include "backend/cpu/kernels/avx512/attention.inl"
#include "backend/cpu/kernels/avx512/attention_tokens.inl"
#include "backend/cpu/kernels/avx512/delta.inl"
#include "backend/cpu/kernels/generic/delta_rows.inl"
// clang-format on

namespace {

constexpr KernelTable tiled_table() {
  KernelTable t = kTable;
  t.attention_heads = attention_heads;
  t.attention_tile = attention_tile;
  t.delta_columns = delta_columns_tiles;
  return t;
}
constexpr KernelTable kTiledTable = tiled_table();

}  // namespace
}  // namespace moeflux::backend::cpu::avx512

MOEFLUX_TARGET_END
namespace moeflux::backend::cpu {
namespace {

// Without VNNI bytes are multiplied by the instructions of AVX2: its table's fast kernels, and x8 in the order they want. Without VBMI codes
// are unpacked by them, too: its exact kernels of quantized formats.
KernelTable with_byte_products() noexcept {
  KernelTable t = avx512::kTiledTable;
  if (const KernelTable* bytes = avx2_table()) {
    for (int i = 0; i < kFormatSlots; ++i) t.fast[i] = bytes->fast[i];
    for (int i = 3; i <= 9; ++i) t.exact[i] = bytes->exact[i];
    t.quantize_row = bytes->quantize_row;
    t.token_tile = bytes->token_tile;
    t.interleave = bytes->interleave;
    t.bands = bytes->bands;
  }
  return t;
}

}  // namespace

const KernelTable* avx512_table() noexcept {
  static const KernelTable table = with_byte_products();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") ? &table : nullptr;
}
}  // namespace moeflux::backend::cpu

#else

namespace moeflux::backend::cpu {
const KernelTable* avx512_table() noexcept { return nullptr; }
}  // namespace moeflux::backend::cpu

#endif
