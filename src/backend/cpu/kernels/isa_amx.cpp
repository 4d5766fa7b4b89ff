// The kernels of avx512vbmi with AMX for the fast matmul of many tokens.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "backend/cpu/kernels/kernel_table.h"
#include "backend/cpu/kernels/target.h"
#include "backend/ops.h"
#include "core/float_bits.h"
#include "core/scalar_math.h"
#include "quant/codes.h"

#define MOEFLUX_ISA amx
#define MOEFLUX_ISA_NAME "amx"

#if defined(__x86_64__)

// The C library's; its header is one of the operating system's.
extern "C" long syscall(long number, ...) noexcept;

MOEFLUX_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c,amx-tile,amx-int8")
#include "backend/cpu/kernels/simd_avx512.h"

namespace moeflux::backend::cpu::amx {
// clang-format off: the order is a dependency
#include "backend/cpu/kernels/generic/math.inl"
#include "backend/cpu/kernels/generic/elementwise.inl"
#include "backend/cpu/kernels/generic/matmul.inl"
#include "backend/cpu/kernels/generic/head_matmul.inl"
#include "backend/cpu/kernels/generic/attention.inl"
#include "backend/cpu/kernels/generic/delta.inl"
#include "backend/cpu/kernels/generic/table.inl"
#include "backend/cpu/kernels/avx512/codes_vbmi.inl"
#include "backend/cpu/kernels/avx512/tiles.inl"
#include "backend/cpu/kernels/avx512/matvec.inl"
#include "backend/cpu/kernels/generic/ahead.inl"
#include "backend/cpu/kernels/avx512/linear.inl"
#include "backend/cpu/kernels/avx512/bands.inl"
#include "backend/cpu/kernels/generic/panel_ahead.inl"
#include "backend/cpu/kernels/avx512/gemm.inl"
#include "backend/cpu/kernels/amx/gemm.inl"
// clang-format on

namespace {
// By fast format slot.
constexpr MatMulFn kFast[] = {matmul_fast_amx<3>, matmul_fast_amx<4>, matmul_fast_amx<5>, matmul_fast_amx<6>,
                              matmul_fast_amx<7>, matmul_fast_amx<8>, matmul_fast_amx<9>};
}  // namespace
}  // namespace moeflux::backend::cpu::amx

MOEFLUX_TARGET_END
namespace moeflux::backend::cpu {
namespace {

bool has_amx() noexcept {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kTile) != 0 && (d & kInt8) != 0;
}

// Linux hands out the tile registers on request, for the whole process; asking twice is harmless.
bool may_use_tiles() noexcept {
  constexpr long kArchPrctl = 158, kRequestPermission = 0x1023, kTileData = 18;
  return syscall(kArchPrctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

const KernelTable* amx_table() noexcept {
  if (avx512vbmi_table() == nullptr || !has_amx() || !may_use_tiles()) return nullptr;
  static const KernelTable table = [] {
    KernelTable t = *avx512vbmi_table();
    t.name = "amx";
    for (int i = 0; i < 7; ++i) t.fast[3 + i] = amx::kFast[i];
    t.interleave = amx::interleave_amx;
    t.token_tile = amx::amx_token_tile;
    return t;
  }();
  return &table;
}

}  // namespace moeflux::backend::cpu

#else

namespace moeflux::backend::cpu {
const KernelTable* amx_table() noexcept { return nullptr; }
}  // namespace moeflux::backend::cpu

#endif
