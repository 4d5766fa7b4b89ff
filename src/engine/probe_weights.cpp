// What the memory of this model's experts gives to threads that only read it.
#include <algorithm>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "core/clock.h"
#include "core/thread_pool.h"
#include "engine/engine_impl.h"

namespace moeflux {
namespace {

constexpr std::uint64_t kTaskBytes = std::uint64_t{4} << 20;
constexpr std::uint64_t kMaxTasks = 128;  // 512 MiB: far more than the caches hold
constexpr int kPasses = 8;  // the first ones find threads still waking

// Places of kTaskBytes each, spread over the experts of all layers.
std::vector<const std::uint64_t*> places(const store::ExpertStore& experts, const Copier& copier, std::int64_t n_layers) {
  std::vector<const std::uint64_t*> all;
  for (std::int64_t l = 0; l < n_layers; ++l) {
    const store::ResidentExperts r = experts.resident_layer(LayerIdx(static_cast<std::int32_t>(l)));
    const std::byte* first = r.first.gate.data == nullptr ? nullptr : copier.host_view(r.first.gate.data);
    if (first == nullptr) continue;
    const std::uint64_t bytes = r.stride * static_cast<std::uint64_t>(r.n_experts - 1);  // the last one's end is not known here
    for (std::uint64_t at = 0; at + kTaskBytes <= bytes; at += kTaskBytes)
      all.push_back(reinterpret_cast<const std::uint64_t*>(first + at));
  }
  std::vector<const std::uint64_t*> some;
  const std::size_t n = std::min<std::size_t>(all.size(), kMaxTasks);
  for (std::size_t i = 0; i < n; ++i) some.push_back(all[i * all.size() / n]);
  return some;
}

}  // namespace

double Engine::probe_weights() const {
  const std::vector<const std::uint64_t*> tasks = places(*impl_->experts, impl_->backend->copier(), impl_->info.n_layers);
  if (tasks.empty()) return 0;
  ThreadPool pool(impl_->options.n_threads);
  const backend::WordSum sum_words = backend::widest_word_sum();
  std::vector<std::uint64_t> sums(tasks.size());
  std::uint64_t best_ns = ~std::uint64_t{0};
  for (int pass = 0; pass < kPasses; ++pass) {
    const std::uint64_t start = now_ns();
    pool.run(static_cast<std::int64_t>(tasks.size()), [&](std::int64_t task, int) noexcept {
      const auto i = static_cast<std::size_t>(task);
      sums[i] = sum_words(tasks[i], kTaskBytes / sizeof(std::uint64_t));
    });
    best_ns = std::min(best_ns, now_ns() - start);
  }
  return static_cast<double>(tasks.size() * kTaskBytes) * 1e9 / static_cast<double>(std::max<std::uint64_t>(best_ns, 1));
}

}  // namespace moeflux
