// The kernels of avx512vnni for which VBMI is of use: those that take codes out of bytes.
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

#define MOEFLUX_ISA avx512vbmi
#define MOEFLUX_ISA_NAME "avx512vbmi"

#if defined(__x86_64__)

MOEFLUX_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c")
#include "backend/cpu/kernels/simd_avx512.h"

namespace moeflux::backend::cpu::avx512vbmi {
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
#include "backend/cpu/kernels/avx512/fp8.inl"
#include "backend/cpu/kernels/avx512/exact.inl"
// clang-format on

namespace {

// Codes of 2, 3, 5 and 6 bits; exact, those of 4 and fp8, too.
void add_kernels(KernelTable& t) noexcept {
  t.fast[4] = matmul_fast_tiles<4>, t.fast[5] = matmul_fast_tiles<5>, t.fast[7] = matmul_fast_tiles<7>, t.fast[8] = matmul_fast_tiles<8>;
  t.token_tile = token_tile, t.interleave = interleave_tokens;  // the same ones, for those
  t.exact[3] = matmul_exact_tiles<3>, t.exact[6] = matmul_exact_tiles<6>, t.exact[10] = matmul_exact_tiles<10>;
}

}  // namespace
}  // namespace moeflux::backend::cpu::avx512vbmi

MOEFLUX_TARGET_END
namespace moeflux::backend::cpu {
const KernelTable* avx512vbmi_table() noexcept {
  if (avx512vnni_table() == nullptr || !__builtin_cpu_supports("avx512vbmi")) return nullptr;
  static const KernelTable table = [] {
    KernelTable t = *avx512vnni_table();
    t.name = "avx512vbmi";
    avx512vbmi::add_kernels(t);
    return t;
  }();
  return &table;
}
}  // namespace moeflux::backend::cpu

#else

namespace moeflux::backend::cpu {
const KernelTable* avx512vbmi_table() noexcept { return nullptr; }
}  // namespace moeflux::backend::cpu

#endif
