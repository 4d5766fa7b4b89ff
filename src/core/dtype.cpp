#include "core/dtype.h"

#include <array>

namespace moeflux {
namespace {

struct Entry {
  DType dtype;
  std::string_view name;
  std::uint32_t bits;
};

constexpr std::array kEntries{
    Entry{DType::Bool, "BOOL", 8},          Entry{DType::U8, "U8", 8},
    Entry{DType::I8, "I8", 8},              Entry{DType::U16, "U16", 16},
    Entry{DType::I16, "I16", 16},           Entry{DType::U32, "U32", 32},
    Entry{DType::I32, "I32", 32},           Entry{DType::U64, "U64", 64},
    Entry{DType::I64, "I64", 64},           Entry{DType::F16, "F16", 16},
    Entry{DType::BF16, "BF16", 16},         Entry{DType::F32, "F32", 32},
    Entry{DType::F64, "F64", 64},           Entry{DType::C64, "C64", 64},
    Entry{DType::F8E4M3, "F8_E4M3", 8},     Entry{DType::F8E5M2, "F8_E5M2", 8},
    Entry{DType::F8E8M0, "F8_E8M0", 8},     Entry{DType::F8E4M3FNUZ, "F8_E4M3FNUZ", 8},
    Entry{DType::F8E5M2FNUZ, "F8_E5M2FNUZ", 8}, Entry{DType::F6E2M3, "F6_E2M3", 6},
    Entry{DType::F6E3M2, "F6_E3M2", 6},     Entry{DType::F4, "F4", 4},
};

constexpr bool entries_in_enum_order() {
  for (std::size_t i = 0; i < kEntries.size(); ++i)
    if (static_cast<std::size_t>(kEntries[i].dtype) != i) return false;
  return true;
}
static_assert(entries_in_enum_order());

}  // namespace

std::uint32_t dtype_bits(DType dtype) noexcept { return kEntries[static_cast<std::size_t>(dtype)].bits; }

std::string_view dtype_name(DType dtype) noexcept { return kEntries[static_cast<std::size_t>(dtype)].name; }

std::optional<DType> dtype_from_name(std::string_view name) noexcept {
  for (const Entry& e : kEntries)
    if (e.name == name) return e.dtype;
  return std::nullopt;
}

}  // namespace moeflux
