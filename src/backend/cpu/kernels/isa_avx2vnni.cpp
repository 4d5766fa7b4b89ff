// The kernels compiled for AVX2, FMA, F16C and AVX-VNNI: processors of Intel since 2021 that lack AVX-512.
#include <cstddef>
#include <cstdint>
#include <cstring>

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

#define MOEFLUX_ISA avx2vnni
#define MOEFLUX_ISA_NAME "avx2vnni"
#define MOEFLUX_BYTE_DOTS 1

#if defined(__x86_64__)

MOEFLUX_TARGET_BEGIN("avx2,fma,f16c,avxvnni")
#include "backend/cpu/kernels/simd_avx2.h"

namespace moeflux::backend::cpu::avx2vnni {
#include "backend/cpu/kernels/avx2/table.inl"
}  // namespace moeflux::backend::cpu::avx2vnni

MOEFLUX_TARGET_END
namespace moeflux::backend::cpu {
namespace {

// By cpuid: compilers do not agree on a name for it.
bool has_avx_vnni() noexcept {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kAvxVnni = 1u << 4;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & kAvxVnni) != 0;
}

}  // namespace

const KernelTable* avx2vnni_table() noexcept { return avx2_table() != nullptr && has_avx_vnni() ? &avx2vnni::kAvx2Table : nullptr; }
}  // namespace moeflux::backend::cpu

#else

namespace moeflux::backend::cpu {
const KernelTable* avx2vnni_table() noexcept { return nullptr; }
}  // namespace moeflux::backend::cpu

#endif
