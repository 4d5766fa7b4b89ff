// What a sequence keeps is what the formulas say.
#include "session/sequence_state.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "model/family.h"
#include "support/tensor_file.h"

namespace moeflux::session {
namespace {

// Values per position and layer: keys and values, or the latent and one rotated key.
std::uint64_t values_per_position(const model::LayerSpec& layer) {
  if (const auto* gqa = std::get_if<model::GqaSpec>(&layer.mixer))
    return static_cast<std::uint64_t>(2 * gqa->n_kv_heads * gqa->head_dim);
  if (const auto* mla = std::get_if<model::MlaSpec>(&layer.mixer))
    return static_cast<std::uint64_t>(mla->kv_rank + mla->rope_dim);
  return 0;
}

std::uint64_t fixed_values(const model::LayerSpec& layer) {
  const auto* d = std::get_if<model::GatedDeltaSpec>(&layer.mixer);
  if (d == nullptr) return 0;
  return static_cast<std::uint64_t>(d->n_v_heads * d->v_dim * d->k_dim +
                                    (d->n_taps - 1) *
                                        (2 * d->n_k_heads * d->k_dim + d->n_v_heads * d->v_dim));
}

TEST(SequenceState, EveryFixtureTakesWhatTheFormulaSays) {
  HostAllocator allocator;
  HostCopier copier;
  int n_latent = 0;
  for (const auto& entry : std::filesystem::directory_iterator(test::fixtures())) {
    if (!std::filesystem::exists(entry.path() / "config.json")) continue;
    const model::ModelSpec spec = model::parse_model(format::ModelFolder::open(entry.path())).spec;
    std::uint64_t growing = 0, fixed = 0;
    for (const model::LayerSpec& layer : spec.layers) {
      growing += values_per_position(layer);
      fixed += fixed_values(layer);
      n_latent += std::holds_alternative<model::MlaSpec>(layer.mixer) ? 1 : 0;
    }
    for (const std::int64_t n : {1, 100, 700}) {
      const auto ctx = static_cast<std::uint64_t>(n);
      EXPECT_EQ(SequenceState(spec, n, KvType::F32, allocator, copier).bytes(), 4 * (growing * ctx + fixed))
          << entry.path();
      EXPECT_EQ(SequenceState(spec, n, KvType::F16, allocator, copier).bytes(), 2 * growing * ctx + 4 * fixed)
          << entry.path();
    }
  }
  EXPECT_GT(n_latent, 8);
}

}  // namespace
}  // namespace moeflux::session
