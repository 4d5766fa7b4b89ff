// The word a user probably meant.
#pragma once

#include <span>
#include <string_view>

namespace moeflux::cli {

// The candidate with the smallest edit distance, or one that starts with `word`; empty when none is near.
std::string_view nearest(std::string_view word, std::span<const std::string_view> candidates);

}  // namespace moeflux::cli
