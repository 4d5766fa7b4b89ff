// Attention: many tokens, the groups' merging, and which kernels an op takes. (A latent cache in precision fast: ops_mla.cu.)
#include "backend/cuda/attention.h"
#include "backend/cuda/mla.h"

namespace moeflux::backend::cuda {
namespace {

template <int Rows, int Dims>
__global__ void __launch_bounds__(kAttentionThreads, 2) attention_kernel(const __grid_constant__ AttentionArgs a) {
  extern __shared__ __align__(16) float memory[];
  using S = Shape<Rows, Dims>;
  Block<Rows, Dims> b(a, memory);
  begin_kernel();
  b.kv = blockIdx.y;
  // Late tokens see the most keys: they go first.
  b.r0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Rows;
  b.n = min(Rows, a.n_tokens * a.shared_heads - b.r0);
  b.load_queries();
  b.reset();
  __syncthreads();
  int begin = b.range[0], end = b.range[2 * b.n - 1];  // rows ascend by token
  if (a.partials != nullptr) {
    begin = max(begin, static_cast<int>(blockIdx.z) * kGroupKeys);
    end = min(end, static_cast<int>(blockIdx.z + 1) * kGroupKeys);
    if (begin >= end) return;
  }
  const int first_group = begin / kGroupKeys, last_group = (end - 1) / kGroupKeys;
  for (int base = begin / kTile * kTile; base < end; base += kTile) {
    if (b.copies())
      b.dot_tile(base, end);
    else
      for (int first = base; first < base + kTile; first += S::kKeys) b.dot_keys(base, first, end);
    __syncthreads();
    b.softmax_tile(base);
    __syncthreads();
    b.add_values(base, end);
    if (first_group != last_group && ((base + kTile) % kGroupKeys == 0 || base + kTile >= end)) b.merge_group(base / kGroupKeys);
  }
  if (a.partials != nullptr)
    b.write_partial(blockIdx.z);
  else if (first_group != last_group)
    b.write(b.total_m, b.total_l, true);
  else
    b.write(b.m, b.l, false);
}

// Groups of one query row in order: merged, the sink, the division. A block per row.
__global__ void merge_kernel(const __grid_constant__ AttentionArgs a) {
  begin_kernel();
  const std::int64_t row = blockIdx.x;
  const int t = static_cast<int>(row / a.n_heads), h = static_cast<int>(row % a.n_heads);
  const std::int64_t p = static_cast<std::int64_t>(a.pos.get()) + t;
  const int begin = static_cast<int>(a.window > 0 && p - a.window + 1 > 0 ? p - a.window + 1 : 0);
  const int g0 = begin / kGroupKeys, g1 = static_cast<int>(p / kGroupKeys);
  const float* parts = a.partials + row * a.n_groups * (a.vd + 2);
  for (int d = threadIdx.x; d < a.vd; d += blockDim.x) {
    const float* first = parts + static_cast<std::int64_t>(g0) * (a.vd + 2);
    float m = first[0], l = first[1], acc = first[2 + d];
    for (int g = g0 + 1; g <= g1; ++g) {
      const float* next = parts + static_cast<std::int64_t>(g) * (a.vd + 2);
      const float top = m > next[0] ? m : next[0], ca = math::exp(m - top), cb = math::exp(next[0] - top);
      l = math::fma(next[1], cb, l * ca);
      acc = math::fma(next[2 + d], cb, acc * ca);
      m = top;
    }
    if (a.sinks != nullptr) {
      const float top = m > a.sinks[h] ? m : a.sinks[h], factor = math::exp(m - top);
      l = math::fma(l, factor, math::exp(a.sinks[h] - top));
      acc = acc * factor;
    }
    a.y[t * a.y_token + h * a.y_head + d] = acc * (1.0f / l);
  }
}

template <int Rows, int Dims>
void run_many(CudaStream& s, AttentionArgs a) {
  using S = Shape<Rows, Dims>;
  const unsigned blocks = static_cast<unsigned>(ceil_div(static_cast<std::int64_t>(a.n_tokens) * a.shared_heads, Rows));
  const auto n_kv = static_cast<unsigned>(a.n_heads / a.shared_heads);
  const bool split = a.n_groups > 1 && blocks * n_kv < 264;  // two blocks for each of some hundred processors
  if (split) allocate_partials(s, a);
  launch_large(s, "Attention", attention_kernel<Rows, Dims>, dim3(blocks, n_kv, split ? static_cast<unsigned>(a.n_groups) : 1u), kAttentionThreads,
               S::bytes(a.hd, !split && a.n_groups > 1), a);
  if (split) merge_groups(s, a);
}

}  // namespace

void allocate_partials(CudaStream& s, AttentionArgs& a) {
  a.partials = s.scratch_of<float>(Scratch::Partials, static_cast<std::size_t>(a.n_tokens) * static_cast<std::size_t>(a.n_heads) *
                                                          static_cast<std::size_t>(a.n_groups) * static_cast<std::size_t>(a.vd + 2));
}

void merge_groups(CudaStream& s, const AttentionArgs& a) {
  launch(s, "Attention: merging groups", merge_kernel, static_cast<unsigned>(a.n_tokens * a.n_heads), 128, 0, a);
}

void CudaBackend::execute(Stream& stream, const Attention& op) {
  CudaStream& s = use(stream);
  if (run_latent_attention(s, op)) return;
  AttentionArgs a{};
  a.q = op.q.f32(), a.k = static_cast<const std::byte*>(op.k.data), a.v = static_cast<const std::byte*>(op.v.data);
  a.sinks = op.sinks.f32(), a.y = op.y.f32();
  a.q_token = op.q.stride(0), a.q_head = op.q.stride(1), a.k_row = op.k.stride(0), a.k_head = op.k.stride(1);
  a.v_row = op.v.stride(0), a.v_head = op.v.stride(1), a.y_token = op.y.stride(0), a.y_head = op.y.stride(1);
  a.n_tokens = static_cast<int>(op.q.dim(0)), a.n_heads = static_cast<int>(op.q.dim(1));
  a.shared_heads = a.n_heads / static_cast<int>(op.k.dim(1));
  a.hd = static_cast<int>(op.q.dim(2)), a.vd = static_cast<int>(op.v.dim(2));
  a.pos = s.position(op.pos0), a.window = op.window, a.scale = op.scale;
  a.n_groups = static_cast<int>((op.pos0 + op.q.dim(0) - 1) / kGroupKeys) + 1;
  a.f16 = op.k.dtype == DType::F16;
  const std::uintptr_t size = a.f16 ? 8 : 16;
  a.q_vectors = reinterpret_cast<std::uintptr_t>(a.q) % 16 == 0 && a.q_token % 4 == 0 && a.q_head % 4 == 0 && a.hd % 4 == 0;
  a.k_vectors = reinterpret_cast<std::uintptr_t>(a.k) % size == 0 && a.k_row % 4 == 0 && a.k_head % 4 == 0;
  a.v_vectors = reinterpret_cast<std::uintptr_t>(a.v) % size == 0 && a.v_row % 4 == 0 && a.v_head % 4 == 0;
  if (a.vd > 512 || Shape<16, 512>::bytes(a.hd, true) > s.traits.shared_bytes) raise(cudaErrorNotSupported, "attention with heads of this width");
  if (a.n_tokens <= kMatvecTokens)
    attend_few(s, a);
  else if (a.vd > 256 || Shape<32, 256>::bytes(a.hd, true) > std::min<std::size_t>(s.traits.shared_bytes, 112u << 10))
    run_many<16, 512>(s, a);
  else if (a.vd > 128)
    run_many<32, 256>(s, a);
  else if (a.vd > 64)
    run_many<32, 128>(s, a);
  else
    run_many<32, 64>(s, a);
}

}  // namespace moeflux::backend::cuda
