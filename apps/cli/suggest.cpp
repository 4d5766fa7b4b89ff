#include "cli/suggest.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace moeflux::cli {
namespace {

// Insertions, deletions and replacements that turn a into b.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, diagonal + 1, row[j] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string_view nearest(std::string_view word, std::span<const std::string_view> candidates) {
  // Nothing longer is a slip of the fingers, and the table above stays small.
  constexpr std::size_t kMaxWord = 40;
  if (word.empty() || word.size() > kMaxWord) return {};
  std::string_view best;
  std::size_t best_distance = 3;
  for (const std::string_view candidate : candidates) {
    if (candidate.starts_with(word)) return candidate;
    // A distance as long as the word itself says nothing.
    const std::size_t distance = edit_distance(word, candidate);
    if (distance < best_distance && distance < word.size()) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

}  // namespace moeflux::cli
