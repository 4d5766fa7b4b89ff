// What MatMul and the feed-forwards share on the host side. Only for CUDA sources.
#pragma once

#include "backend/cuda/cuda_internal.h"
#include "backend/cuda/gemm.h"

namespace moeflux::backend::cuda {

// Up to here every token is a matvec of its own; above, tensor cores pay.
inline constexpr std::int64_t kMatvecTokens = 4;

inline bool is_fast(const quant::MatrixView& w, Precision p) { return p == Precision::Fast && w.format.integer_codes(); }

// Rows to quantize: x, or glu(x, up) where up is given; both with the same stride.
struct RowsSource {
  const float* x;
  const float* up;
  std::int64_t x_stride;
  GluParams glu;
};

// n rows in 8 bits as w wants them (its columns, group and order), in a scratch buffer of the stream.
QuantizedRows quantize_rows(CudaStream& s, Scratch where, const RowsSource& source, std::int64_t n, const Matrix& w);

// How codes reach the tensor cores: packed nibbles with scales of either type, or unpacked bytes of either sign.
enum class Codes : std::uint8_t { NibblesBf16, NibblesF16, Unsigned, Signed };

inline Codes codes_of(const Matrix& w) {
  if (packed_nibbles(w)) return w.scale_dtype == DType::BF16 ? Codes::NibblesBf16 : Codes::NibblesF16;
  return w.kind == quant::FormatKind::Mxfp4 ? Codes::Signed : Codes::Unsigned;
}
// f.template operator()<C>() for the matrix's C.
template <class F>
void with_codes(const Matrix& w, F&& f) {
  switch (codes_of(w)) {
    case Codes::NibblesBf16:
      return f.template operator()<Codes::NibblesBf16>();
    case Codes::NibblesF16:
      return f.template operator()<Codes::NibblesF16>();
    case Codes::Unsigned:
      return f.template operator()<Codes::Unsigned>();
    case Codes::Signed:
      return f.template operator()<Codes::Signed>();
  }
}
template <Codes C>
constexpr std::size_t tile_bytes() {
  return C == Codes::NibblesBf16 || C == Codes::NibblesF16 ? sizeof(NibbleShared) : sizeof(GemmShared);
}
template <Codes C>
__device__ inline void run_tile(std::byte* memory, const GemmTile& t, int row0) {
  if constexpr (C == Codes::NibblesBf16 || C == Codes::NibblesF16)
    nibble_tile<C == Codes::NibblesBf16>(*reinterpret_cast<NibbleShared*>(memory), t, row0);
  else
    gemm_tile<C == Codes::Signed>(*reinterpret_cast<GemmShared*>(memory), t, row0);
}

void gemm(CudaStream& s, const Matrix& w, const QuantizedRows& x, const float* bias, float* y, std::int64_t y_stride, std::int64_t n);
void gemm_exact(CudaStream& s, const Matrix& w, const float* x, std::int64_t x_stride, const float* bias, float* y, std::int64_t y_stride, std::int64_t n);

}  // namespace moeflux::backend::cuda
