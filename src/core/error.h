// Throwing with a formatted message. Not for headers that CUDA sources include (fmt does not compile there).
#pragma once

#include <fmt/format.h>

#include <moeflux/error.h>

#include <utility>

namespace moeflux {

template <class... Args>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace moeflux
