#include "cli/byte_bar.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/common.h"

namespace moeflux::cli {

void ByteBar::show(std::uint64_t done_bytes, std::uint64_t total_bytes) {
  if (!line_.due()) return;
  const double done = static_cast<double>(done_bytes), total = static_cast<double>(total_bytes);
  const double share = total > 0 ? done / total : 1;
  const double rate = std::max(done, 1.0) / std::max(seconds(), 1e-3);
  constexpr std::size_t kWidth = 30;
  const std::size_t filled = std::min(kWidth, static_cast<std::size_t>(share * kWidth));
  line_.show(fmt::format("[{}{}] {:3.0f} %, {} of {}, {}/s, {} left", std::string(filled, '#'),
                         std::string(kWidth - filled, '.'), share * 100, bytes_text(done), bytes_text(total),
                         bytes_text(rate), duration_text((total - done) / rate)));
}

double ByteBar::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

std::string duration_text(double seconds) {
  const auto s = static_cast<long>(seconds + 0.5);
  return s < 60 ? fmt::format("{} s", s) : fmt::format("{} min {:02} s", s / 60, s % 60);
}

}  // namespace moeflux::cli
