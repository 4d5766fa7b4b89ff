// CausalConv, DeltaGates, GatedDelta.
#include <algorithm>
#include <cstring>

#include "backend/cpu/cpu_internal.h"
#include "core/scalar_math.h"

namespace moeflux::backend::cpu {
namespace {

constexpr std::int64_t kChannelsPerTask = 256;
// 16 columns of 128 keys are 8 KiB of state: first-level cache. Many tokens' keys and queries are brought together for every task: wider ones
// as long as there are enough for the threads.
constexpr std::int64_t kLeastColumnsPerTask = 16, kMostColumnsPerTask = 128, kTilesPerThread = 4;

std::int64_t columns_per_task(const GatedDelta& op, int n_threads) noexcept {
  std::int64_t columns = kLeastColumnsPerTask;
  if (op.q.dim(0) == 1) return columns;
  while (columns < kMostColumnsPerTask && op.v.dim(1) * (op.v.dim(2) / (2 * columns)) >= kTilesPerThread * n_threads) columns *= 2;
  return columns;
}

// Channels [c0, c1) of the last K-1 inputs, oldest first, become the state. Each task moves its own: they are in its cache.
void advance_conv_state(const CausalConv& op, std::int64_t c0, std::int64_t c1) noexcept {
  const std::int64_t keep = op.state.dim(0), n_tokens = op.u.dim(0);
  for (std::int64_t i = 0; i < keep; ++i) {
    const std::int64_t from = n_tokens - keep + i;  // below 0: an older state row, which lies further on
    std::memcpy(op.state.row(i) + c0, (from < 0 ? op.state.row(from + keep) : op.u.row(from)) + c0, static_cast<std::size_t>(c1 - c0) * 4);
  }
}

}  // namespace

void CpuBackend::execute(Stream&, const CausalConv& op) {
  ConvBlock b;
  b.u = op.u.f32();
  b.w = op.w.f32();
  b.state = op.state.f32();
  b.y = op.y.f32();
  b.u_stride = op.u.stride(0);
  b.y_stride = op.y.stride(0);
  b.n_channels = op.u.dim(1);
  b.n_taps = op.w.dim(1);
  b.n_tokens = op.u.dim(0);
  pool_.run((b.n_channels + kChannelsPerTask - 1) / kChannelsPerTask, [&](std::int64_t i, int) noexcept {
    const std::int64_t c0 = i * kChannelsPerTask, c1 = std::min(b.n_channels, c0 + kChannelsPerTask);
    k_.conv(b, c0, c1);
    advance_conv_state(op, c0, c1);
  });
}

void CpuBackend::execute(Stream&, const DeltaGates& op) {
  const auto token = [&](std::int64_t t, int) noexcept {
    for (std::int64_t h = 0; h < op.a.dim(1); ++h) {
      const float g = op.neg_exp_a.f32()[h] * math::softplus(op.a.row(t)[h] + op.dt_bias.f32()[h]);
      op.decay.row(t)[h] = math::exp(g);
      op.beta.row(t)[h] = math::sigmoid(op.b.row(t)[h]);
    }
  };
  constexpr std::int64_t kInlineTokens = 8;  // some microseconds of scalar work
  if (op.a.dim(0) <= kInlineTokens)
    for (std::int64_t t = 0; t < op.a.dim(0); ++t) token(t, 0);
  else
    pool_.run(op.a.dim(0), token);
}

void CpuBackend::execute(Stream&, const GatedDelta& op) {
  const std::int64_t n_heads = op.v.dim(1), dv = op.v.dim(2), dk = op.q.dim(2);
  const std::int64_t columns = columns_per_task(op, pool_.size()), blocks = (dv + columns - 1) / columns;
  pool_.run(n_heads * blocks, [&](std::int64_t i, int) noexcept {
    const std::int64_t h = i / blocks, c = i % blocks * columns, kh = op.k_head_of(h);
    DeltaBlock b;
    b.q = op.q.f32() + kh * op.q.stride(1);
    b.k = op.k.f32() + kh * op.k.stride(1);
    b.v = op.v.f32() + h * op.v.stride(1);
    b.decay = op.decay.f32() + h;
    b.beta = op.beta.f32() + h;
    b.state = op.state.f32() + h * dv * dk;
    b.y = op.y.f32() + h * op.y.stride(1);
    b.q_stride = op.q.stride(0);
    b.k_stride = op.k.stride(0);
    b.v_stride = op.v.stride(0);
    b.decay_stride = op.decay.stride(0);
    b.beta_stride = op.beta.stride(0);
    b.y_stride = op.y.stride(0);
    b.n_tokens = op.q.dim(0);
    b.dk = dk;
    k_.delta_columns(b, c, std::min(dv, c + columns));
  });
}

}  // namespace moeflux::backend::cpu
