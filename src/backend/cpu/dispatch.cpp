// Chooses the kernel table, once, at start.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <array>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/cpu_internal.h"
#include "core/error.h"

namespace moeflux::backend {
namespace {

std::vector<const cpu::KernelTable*> available_tables() {
  std::vector<const cpu::KernelTable*> tables;
  // Best first.
  for (const cpu::KernelTable* t :
       {cpu::amx_table(), cpu::avx512vbmi_table(), cpu::avx512vnni_table(), cpu::avx512_table(), cpu::avx2vnni_table(), cpu::avx2_table(), cpu::neon_table(), cpu::scalar_table()})
    if (t != nullptr) tables.push_back(t);
  return tables;
}

}  // namespace

namespace cpu {
namespace {

#if defined(__x86_64__)
// As cpuid counts: 0x19 is Zen 3 and 4, 0x1a Zen 5.
unsigned family() noexcept {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return 0;
  const unsigned base = a >> 8 & 0xf;
  return base == 0xf ? base + (a >> 20 & 0xff) : base;
}
#endif

}  // namespace

bool reads_better_ahead() noexcept {
#if defined(__x86_64__)
  static const bool yes = __builtin_cpu_is("intel") != 0 || (__builtin_cpu_is("amd") != 0 && family() >= 0x1a);
  return yes;
#else
  return false;
#endif
}

}  // namespace cpu

WordSum widest_word_sum() noexcept { return available_tables().front()->sum_words; }

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const cpu::KernelTable* t : available_tables()) names.emplace_back(t->name);
  return names;
}

std::unique_ptr<Backend> make_cpu_backend(const CpuOptions& options) {
  const auto tables = available_tables();
  for (const cpu::KernelTable* t : tables)
    if (options.isa.empty() || options.isa == t->name) return std::make_unique<cpu::CpuBackend>(*t, options);
  fail(ErrorCode::InvalidArgument, "instruction set \"{}\" is not available here; choose one of: {}", options.isa,
       fmt::join(supported_isas(), ", "));
}

}  // namespace moeflux::backend

namespace moeflux::backend::cpu {

std::string CpuBackend::name() const {
  return fmt::format("cpu {}, {} thread{}", k_.name, pool_.size(), pool_.size() == 1 ? "" : "s");
}

std::byte* Scratch::get(std::size_t bytes) {
  if (buffer_.bytes() < bytes) {
    buffer_ = Buffer();
    buffer_ = allocator_->allocate(bytes, 64);
  }
  return buffer_.data();
}

}  // namespace moeflux::backend::cpu
