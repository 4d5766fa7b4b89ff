// A backend whose fast matmuls get every matrix in bands that has them: the cases of matmuls and experts for a second order of rows.
#pragma once

#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "quant/bands.h"

namespace moeflux::backend::cases {

class BandsBackend final : public Backend {
 public:
  explicit BandsBackend(std::unique_ptr<Backend> inner) : inner_(std::move(inner)) {}

  std::string name() const override { return inner_->name() + ", bands"; }
  std::unique_ptr<Stream> create_stream() override { return inner_->create_stream(); }
  void synchronize(Stream& s) override { inner_->synchronize(s); }
  Allocator& allocator() noexcept override { return inner_->allocator(); }
  Copier& copier() noexcept override { return inner_->copier(); }

  std::int64_t n_banded() const noexcept { return n_banded_; }  // matrices so far

 protected:
#define MOEFLUX_BANDS_OP(Op) \
  void execute(Stream& s, const Op& op) override { hand_on(s, op); }
  MOEFLUX_FOR_EACH_OP(MOEFLUX_BANDS_OP)
#undef MOEFLUX_BANDS_OP

 private:
  template <class Op>
  void hand_on(Stream& s, const Op& op) {
    inner_->run(s, op);
  }
  void hand_on(Stream& s, const MatMul& op) {
    std::vector<MatMulPart> parts(op.parts.begin(), op.parts.end());
    for (MatMulPart& p : parts) p.w = banded(p.w, op.precision);
    inner_->run(s, MatMul{op.x, parts, op.precision});
    memory_.clear();
  }
  void hand_on(Stream& s, const ExpertFfn& op) {
    std::vector<ExpertWork> works(op.works.begin(), op.works.end());
    for (ExpertWork& w : works)
      for (quant::MatrixView* m : {&w.m.gate, &w.m.up, &w.m.down}) *m = banded(*m, op.precision);
    ExpertFfn copy = op;
    copy.works = works;
    inner_->run(s, copy);
    memory_.clear();
  }

  // A copy in exactly as many bytes as it needs.
  quant::MatrixView banded(quant::MatrixView m, Precision precision) {
    if (precision != Precision::Fast || !quant::has_bands(m.format, m.rows, m.cols)) return m;
    std::vector<std::byte>& memory = memory_.emplace_back(m.bytes());
    const auto rows = static_cast<std::uint64_t>(m.rows);
    std::byte* to = memory.data();
    const auto take = [&](const std::byte*& from, std::uint64_t bytes) {
      std::memcpy(to, from, bytes);
      from = std::exchange(to, to + bytes);
    };
    take(m.data, rows * m.row_bytes());
    take(m.scales, rows * m.scale_row_bytes());
    take(m.biases, rows * m.scale_row_bytes());
    ++n_banded_;
    return quant::to_bands(m, memory.data(), inner_->allocator());
  }

  std::unique_ptr<Backend> inner_;
  std::deque<std::vector<std::byte>> memory_;  // of the op that runs
  std::int64_t n_banded_ = 0;
};

}  // namespace moeflux::backend::cases
