// Small types that appear in every public signature.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <type_traits>

namespace moeflux {

// Strong index types: a layer is not an expert is not a token. raw() gives the number.
enum class TokenId : std::int32_t {};
enum class LayerIdx : std::int32_t {};
enum class ExpertIdx : std::int32_t {};

template <class E>
  requires std::is_enum_v<E>
constexpr std::underlying_type_t<E> raw(E value) noexcept {
  return static_cast<std::underlying_type_t<E>>(value);
}

// How matrices are multiplied. Exact: f32 activations. Fast: activations in 8 bits per group of the weight's
// format where the weight is quantized, exact integer arithmetic inside a group; plain matrices and routers see
// f32 in both. Either gives the same bytes on every machine.
enum class Precision : std::uint8_t { Exact, Fast };

// The element type of the key/value cache.
enum class KvType : std::uint8_t { F32, F16 };

enum class LogLevel { Debug, Info, Warning, Error };

// The library never prints: messages go to the sink the caller gave, or nowhere. May be called from
// any thread, one call at a time.
using LogSink = std::function<void(LogLevel, std::string_view)>;

// Called during long work with what has been done of the total (bytes or steps); done == total once
// at the end. Called from the thread that runs the work.
using ProgressSink = std::function<void(std::string_view what, std::uint64_t done, std::uint64_t total)>;

}  // namespace moeflux
