// Throwing moeflux::Error with a formatted message.
#pragma once

#include <fmt/format.h>

#include <moeflux/error.h>

#include <utility>

namespace moeflux::cli {

template <class... Args>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace moeflux::cli
