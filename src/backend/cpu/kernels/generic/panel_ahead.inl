// Matmuls of few tokens wait for memory if all of a panel's lines are asked for when it is filled. So they are asked for while the panel
// before is multiplied, and so are the lines of its results.

namespace {

// The lines of the panel to come, asked for a few at a time while this one is multiplied.
class PanelAhead {
 public:
  // All of them in so many steps.
  MOEFLUX_MATH PanelAhead(const RowsToCome& rows, std::int64_t panel_rows, std::int64_t n_steps) noexcept {
    if (rows.w == nullptr || rows.row >= rows.w->rows) return;
    const quant::MatrixView& w = *rows.w;
    const std::int64_t n = w.rows - rows.row < panel_rows ? w.rows - rows.row : panel_rows;
    std::int64_t n_lines = 0;
    const auto add = [&](const std::byte* p, std::uint64_t row_bytes) noexcept {
      if (p == nullptr) return;
      const auto* at = reinterpret_cast<const char*>(p) + static_cast<std::uint64_t>(rows.row) * row_bytes;
      runs_[n_runs_++] = {at, at + static_cast<std::uint64_t>(n) * row_bytes};
      n_lines += static_cast<std::int64_t>(static_cast<std::uint64_t>(n) * row_bytes / 64 + 1);
    };
    add(w.biases, w.scale_row_bytes());
    add(w.scales, w.scale_row_bytes());
    add(w.data, w.order == quant::Order::Bands ? w.row_bytes() + 2 * w.scale_row_bytes() : w.row_bytes());
    n_lines_ = (n_lines + n_steps - 1) / n_steps;
  }
  MOEFLUX_MATH void ask() noexcept {
    for (std::int64_t i = 0; i < n_lines_ && n_runs_ > 0; ++i) {
      Run& r = runs_[n_runs_ - 1];
      __builtin_prefetch(r.at, 0, 2);
      r.at += 64;
      if (r.at >= r.end) --n_runs_;
    }
  }

 private:
  struct Run {
    const char *at, *end;
  };
  Run runs_[3];  // the last one first
  int n_runs_ = 0;
  std::int64_t n_lines_ = 0;  // of a step
};

// Where a token's results of a panel will be written.
MOEFLUX_MATH void ask_for_results(const MatMulBlock& b, std::int64_t t, std::int64_t row, std::int64_t n_rows) noexcept {
  const float* y = y_row(b, t) + row;
  for (std::int64_t i = 0; i < n_rows; i += 16) __builtin_prefetch(y + i, 1, 3);
}

}  // namespace
