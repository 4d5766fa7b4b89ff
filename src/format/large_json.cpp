#include "format/large_json.h"

#include <cstring>
#include <span>
#include <utility>

#include "core/error.h"

namespace moeflux::format {

LargeJson::LargeJson(const io::File& file, std::uint64_t offset, std::uint64_t bytes, std::string what)
    : origin_(fmt::format("{}: {} (bytes {} to {})", file.path().string(), what, offset, offset + bytes)),
      bytes_(static_cast<std::size_t>(bytes)),
      text_(std::make_unique_for_overwrite<char[]>(bytes_ + simdjson::SIMDJSON_PADDING)) {
  file.read_exact(offset, std::as_writable_bytes(std::span(text_.get(), bytes_)));
  std::memset(text_.get() + bytes_, 0, simdjson::SIMDJSON_PADDING);
}

simdjson::dom::object LargeJson::parse_object(std::size_t max_depth) {
  using simdjson::error_code;
  // The parser's own limit is the first depth that is too much.
  error_code error = parser_.allocate(bytes_, max_depth + 1);
  simdjson::dom::element root;
  if (error == error_code::SUCCESS) error = parser_.parse(text_.get(), bytes_, false).get(root);
  switch (error) {
    case error_code::SUCCESS:
      break;
    case error_code::UTF8_ERROR:
      fail(ErrorCode::InvalidModel, "{}: not valid UTF-8", origin_);
    case error_code::DEPTH_ERROR:
      fail(ErrorCode::InvalidModel, "{}: JSON nested deeper than {} levels", origin_, max_depth);
    case error_code::NUMBER_ERROR:
      fail(ErrorCode::InvalidModel, "{}: not valid JSON: a number is malformed or does not fit 64 bits",
           origin_);
    case error_code::MEMALLOC:
      fail(ErrorCode::OutOfMemory, "{}: no memory to parse it", origin_);
    default:
      fail(ErrorCode::InvalidModel, "{}: not valid JSON: {}", origin_, simdjson::error_message(error));
  }
  simdjson::dom::object object;
  if (root.get(object) != error_code::SUCCESS)
    fail(ErrorCode::InvalidModel, "{}: not a JSON object", origin_);
  return object;
}

bool is_utf8(std::string_view text) noexcept { return simdjson::validate_utf8(text.data(), text.size()); }

}  // namespace moeflux::format
