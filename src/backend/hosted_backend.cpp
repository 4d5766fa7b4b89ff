#include "backend/hosted_backend.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "backend/view_walk.h"

namespace moeflux::backend {
namespace {

// Host memory that an op touches, as disjoint blocks with a copy each on the device.
class Blocks {
 public:
  void add(const void* data, std::size_t bytes, bool written) {
    if (data == nullptr || bytes == 0) return;
    const auto* begin = static_cast<const std::byte*>(data);
    blocks_.push_back({begin, begin + bytes, written, {}});
  }
  void add(const TensorView& v, bool written) { add(v.data, view_extent_bytes(v), written); }
  void add(const quant::MatrixView& m) {
    if (m.empty()) return;
    const auto rows = static_cast<std::size_t>(m.rows);
    add(m.data, rows * m.row_bytes(), false);
    add(m.scales, rows * m.scale_row_bytes(), false);
    add(m.biases, rows * m.scale_row_bytes(), false);
  }

  // Overlapping ranges become one block: an output may be an input.
  void upload(Allocator& allocator, Copier& copier) {
    std::sort(blocks_.begin(), blocks_.end(), [](const Block& a, const Block& b) { return a.begin < b.begin; });
    std::vector<Block> merged;
    for (Block& b : blocks_) {
      if (!merged.empty() && b.begin < merged.back().end) {
        merged.back().end = std::max(merged.back().end, b.end);
        merged.back().written |= b.written;
      } else {
        merged.push_back(std::move(b));
      }
    }
    blocks_ = std::move(merged);
    for (Block& b : blocks_) {
      const auto bytes = static_cast<std::size_t>(b.end - b.begin);
      b.copy = allocator.allocate(bytes, 64);
      copier.to_device(b.copy.data(), b.begin, bytes);
    }
  }
  void download(Copier& copier) const {
    for (const Block& b : blocks_)
      if (b.written) copier.to_host(const_cast<std::byte*>(b.begin), b.copy.data(), b.copy.bytes());
  }

  std::byte* moved(const void* data) const {
    const auto* p = static_cast<const std::byte*>(data);
    for (const Block& b : blocks_)
      if (p >= b.begin && p < b.end) return b.copy.data() + (p - b.begin);
    return nullptr;  // a view without elements
  }
  void move(TensorView& v) const { v.data = v.data == nullptr ? nullptr : moved(v.data); }
  void move(quant::MatrixView& m) const {
    if (m.empty()) return;
    m.data = moved(m.data);
    m.scales = m.scales == nullptr ? nullptr : moved(m.scales);
    m.biases = m.biases == nullptr ? nullptr : moved(m.biases);
  }

 private:
  struct Block {
    const std::byte *begin, *end;
    bool written;
    Buffer copy;
  };
  std::vector<Block> blocks_;
};

// An op whose lists can be rewritten.
template <class Op>
struct Editable {
  explicit Editable(const Op& original) : op(original) {
    if constexpr (std::is_same_v<Op, MatMul>) parts.assign(op.parts.begin(), op.parts.end()), op.parts = parts;
    if constexpr (std::is_same_v<Op, ExpertFfn>) works.assign(op.works.begin(), op.works.end()), op.works = works;
  }
  // f(TensorView&, written) and f(MatrixView&) for everything the op points to.
  template <class OnView, class OnMatrix>
  void each(OnView&& view, OnMatrix&& matrix) {
    if constexpr (std::is_same_v<Op, MatMul>) {
      view(op.x, false);
      for (MatMulPart& p : parts) matrix(p.w), view(p.bias, false), view(p.y, true);
    } else {
      op.each_tensor([&](const char*, TensorView& v, Access access) { view(v, access != Access::In); });
    }
    if constexpr (std::is_same_v<Op, Embed>) matrix(op.table);
    if constexpr (std::is_same_v<Op, HeadMatMul>) matrix(op.w);
    if constexpr (std::is_same_v<Op, ExpertFfn>)
      for (ExpertWork& w : works) {
        for (quant::MatrixView* m : {&w.m.gate, &w.m.up, &w.m.down}) matrix(*m);
        for (TensorView* v : {&w.m.gate_bias, &w.m.up_bias, &w.m.down_bias}) view(*v, false);
      }
  }
  Op op;
  std::vector<MatMulPart> parts;
  std::vector<ExpertWork> works;
};

}  // namespace

template <class Op>
void HostedBackend::run_copied(Stream& stream, const Op& op) {
  Editable<Op> edited(op);
  Blocks blocks;
  edited.each([&](TensorView& v, bool written) { blocks.add(v, written); }, [&](quant::MatrixView& m) { blocks.add(m); });
  blocks.upload(inner_.allocator(), inner_.copier());
  edited.each([&](TensorView& v, bool) { blocks.move(v); }, [&](quant::MatrixView& m) { blocks.move(m); });
  forward_to(inner_, stream, edited.op);
  inner_.synchronize(stream);
  blocks.download(inner_.copier());
}

#define MOEFLUX_HOSTED_OP(Op) \
  void HostedBackend::execute(Stream& stream, const Op& op) { run_copied(stream, op); }
MOEFLUX_FOR_EACH_OP(MOEFLUX_HOSTED_OP)
#undef MOEFLUX_HOSTED_OP

}  // namespace moeflux::backend
