// A matvec's weights are asked for some KB before they are read, where that helps (reads_better_ahead()).

namespace {

// Intel's: 4 KB to 16 KB are as fast. AMD's, from Zen 5 on: 6 to 8 KB.
inline constexpr std::ptrdiff_t kBytesAhead = 7168;

template <int Lines>
MOEFLUX_MATH void ask_for_lines(const std::uint8_t* p) noexcept {
#pragma GCC unroll 17
  for (int i = 0; i < Lines; ++i) __builtin_prefetch(p + 64 * i, 0, 2);
}

MOEFLUX_MATH const std::uint8_t* band_at(const MatrixView& w, std::int64_t row) noexcept {
  return reinterpret_cast<const std::uint8_t*>(w.data) + static_cast<std::uint64_t>(row) * (w.row_bytes() + 2 * w.scale_row_bytes());
}

// The bands of a block, group by group, and behind them what the same thread reads next. Not On: nothing at all.
template <bool On>
class BandsAhead {
 public:
  MOEFLUX_MATH BandsAhead(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept : w_(b.w), at_(band_at(b.w, row_begin) + kBytesAhead) {
    go_on(row_end, b.then);
  }
  // The block now ends at row_end.
  MOEFLUX_MATH void go_on(std::int64_t row_end, const RowsToCome& then) noexcept {
    if constexpr (!On) return;
    end_ = nullptr;
    if (then.w == nullptr || then.w->order != quant::Order::Bands || then.w->data == w_.data) return;  // none, or those behind it in memory
    end_ = band_at(w_, row_end), next_ = band_at(*then.w, then.row);
    __builtin_prefetch(next_, 0, 2);
  }
  // A group of so many lines begins: ask for each line's successor when it is read, not for all at once.
  template <int Lines>
  MOEFLUX_MATH void group() noexcept {
    if constexpr (!On) return;
    if (end_ != nullptr && at_ >= end_) at_ = next_ + (at_ - end_), end_ = nullptr;
    asked_ = at_;
    at_ += 64 * Lines;
  }
  MOEFLUX_MATH void line(int i) const noexcept {
    if constexpr (On) __builtin_prefetch(asked_ + 64 * i, 0, 2);
  }

 private:
  const MatrixView& w_;
  const std::uint8_t *at_, *end_ = nullptr, *next_ = nullptr, *asked_ = nullptr;
};

}  // namespace
