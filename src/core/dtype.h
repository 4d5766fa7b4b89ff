// Element types as they stand in files and in memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace moeflux {

enum class DType : std::uint8_t {
  Bool, U8, I8, U16, I16, U32, I32, U64, I64, F16, BF16, F32, F64, C64,
  F8E4M3, F8E5M2, F8E8M0, F8E4M3FNUZ, F8E5M2FNUZ, F6E2M3, F6E3M2, F4,
};

// Bits of one element: 4 and 6 occur, so a tensor's size is a matter of bits.
std::uint32_t dtype_bits(DType dtype) noexcept;
// The safetensors spelling: "BF16", "F8_E4M3", ..
std::string_view dtype_name(DType dtype) noexcept;
std::optional<DType> dtype_from_name(std::string_view name) noexcept;

}  // namespace moeflux
