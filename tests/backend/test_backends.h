// The backends under test, made once per process.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/bands_backend.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/reference/reference_backend.h"

namespace moeflux::backend::cases {

inline Backend& reference() {
  static const std::unique_ptr<Backend> backend = make_reference_backend();
  return *backend;
}

struct CpuVariant {
  std::string isa;
  int n_threads;
  std::unique_ptr<Backend> backend;
  std::string name() const { return isa + " x " + std::to_string(n_threads); }
};

// Every instruction set of this machine with 1, 2 and 5 threads, once more with matrices in bands where it wants them; the first is
// scalar with one thread.
inline const std::vector<CpuVariant>& cpu_variants() {
  static const std::vector<CpuVariant> variants = [] {
    std::vector<std::string> isas = supported_isas();
    std::vector<CpuVariant> out;
    for (auto isa = isas.rbegin(); isa != isas.rend(); ++isa)
      for (const int n : {1, 2, 5}) out.push_back({*isa, n, make_cpu_backend({n, *isa})});
    for (const std::string& isa : isas)
      for (const int n : {1, 2, 5})
        if (auto backend = make_cpu_backend({n, isa}); backend->wants_bands())
          out.push_back({isa + "_bands", n, std::make_unique<BandsBackend>(std::move(backend))});
    return out;
  }();
  return variants;
}

}  // namespace moeflux::backend::cases
