#include "text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "text/utf8.h"

namespace moeflux::text {
namespace {

constexpr std::size_t kMaxSteps = 32;      // real files have one or two
constexpr std::size_t kMaxContent = 64;    // bytes that one match may become
constexpr std::size_t kMaxGrowth = 64;     // times the bytes of the text
constexpr std::size_t kMaxExpansion = 32;  // code points in the longest decomposition (18), rounded up

utf8proc_option_t options_of(UnicodeForm form) noexcept {
  int options = UTF8PROC_STABLE;
  options |= form == UnicodeForm::Nfc || form == UnicodeForm::Nfkc ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE;
  if (form == UnicodeForm::Nfkc || form == UnicodeForm::Nfkd) options |= UTF8PROC_COMPAT;
  return static_cast<utf8proc_option_t>(options);
}

// No code point below this changes in the form.
char32_t first_changing(UnicodeForm form) noexcept {
  switch (form) {
    case UnicodeForm::Nfc:
      return 0x300;
    case UnicodeForm::Nfd:
      return 0xC0;
    default:
      return 0xA0;
  }
}

bool unchanged(std::string_view text, UnicodeForm form) noexcept {
  const char32_t limit = first_changing(form);
  for (std::size_t i = 0; i < text.size();) {
    const Utf8Step step = utf8_step(text, i);
    if (step.code_point >= limit) return false;
    i += step.size;
  }
  return true;
}

std::vector<utf8proc_int32_t> decompose(std::string_view text, utf8proc_option_t options) {
  std::vector<utf8proc_int32_t> out;
  out.reserve(text.size());
  utf8proc_int32_t buffer[kMaxExpansion];
  for (std::size_t i = 0; i < text.size();) {
    const Utf8Step step = utf8_step(text, i);
    i += step.size;
    int boundary = 0;
    const auto n = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(step.code_point), buffer,
                                           kMaxExpansion, options, &boundary);
    if (n < 0 || n > static_cast<utf8proc_ssize_t>(kMaxExpansion))
      fail(ErrorCode::Internal, "Unicode decomposition of U+{:04X} failed",
           static_cast<std::uint32_t>(step.code_point));
    out.insert(out.end(), buffer, buffer + n);
  }
  return out;
}

auto combining_class(utf8proc_int32_t c) noexcept { return utf8proc_get_property(c)->combining_class; }

// Canonical ordering. utf8proc_decompose would do it too, but by exchanging neighbours, which takes
// quadratic time on a long run of marks.
void order_marks(std::vector<utf8proc_int32_t>& text) {
  const auto less = [](utf8proc_int32_t a, utf8proc_int32_t b) {
    return combining_class(a) < combining_class(b);
  };
  const auto is_mark = [](utf8proc_int32_t c) { return combining_class(c) != 0; };
  for (auto it = text.begin(); it != text.end();) {
    it = std::find_if(it, text.end(), is_mark);
    const auto stop = std::find_if_not(it, text.end(), is_mark);
    if (stop - it > 1) std::stable_sort(it, stop, less);
    it = stop;
  }
}

}  // namespace

std::string normalize_unicode(std::string_view text, UnicodeForm form) {
  if (unchanged(text, form)) return std::string(text);
  const utf8proc_option_t options = options_of(form);
  std::vector<utf8proc_int32_t> code_points = decompose(text, options);
  order_marks(code_points);
  auto n = static_cast<utf8proc_ssize_t>(code_points.size());
  if ((options & UTF8PROC_COMPOSE) != 0) n = utf8proc_normalize_utf32(code_points.data(), n, options);
  if (n < 0) fail(ErrorCode::Internal, "Unicode composition failed ({})", n);
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i)
    append_utf8(out, static_cast<char32_t>(code_points[i]));
  return out;
}

Normalizer Normalizer::parse(const JsonNode& node) {
  Normalizer normalizer;
  normalizer.parse_into(node, 0);
  return normalizer;
}

void Normalizer::parse_into(const JsonNode& node, int depth) {
  if (depth > kMaxSequenceNesting)
    node.reject(ErrorCode::Unsupported, "normalizers nested deeper than {}", kMaxSequenceNesting);
  if (steps_.size() >= kMaxSteps) node.reject(ErrorCode::Unsupported, "more than {} normalizers", kMaxSteps);
  const std::string_view type = node.type();
  if (type == "Sequence") {
    for (const JsonNode& child : node.at("normalizers").elements()) parse_into(child, depth + 1);
  } else if (type == "NFC") {
    steps_.emplace_back(UnicodeForm::Nfc);
  } else if (type == "NFD") {
    steps_.emplace_back(UnicodeForm::Nfd);
  } else if (type == "NFKC") {
    steps_.emplace_back(UnicodeForm::Nfkc);
  } else if (type == "NFKD") {
    steps_.emplace_back(UnicodeForm::Nfkd);
  } else if (type == "Prepend") {
    const std::string_view content = node.at("prepend").string();
    if (content.size() > kMaxContent)
      node.reject(ErrorCode::Unsupported, "prepends more than {} bytes", kMaxContent);
    steps_.emplace_back(Prepend{std::string(content)});
  } else if (type == "Replace") {
    const std::string_view content = node.at("content").string();
    if (content.size() > kMaxContent)
      node.reject(ErrorCode::Unsupported, "replaces by more than {} bytes", kMaxContent);
    steps_.emplace_back(Replace{Pattern::parse(node.at("pattern")), std::string(content)});
  } else {
    node.reject(ErrorCode::Unsupported, "normalizer {} is not supported", shown(type));
  }
}

std::string Normalizer::apply_replace(const Replace& step, std::string_view text, MatchBudget& budget) {
  std::string out;
  std::size_t done = 0;
  for (const Match& match : step.pattern.find_all(text, budget)) {
    out.append(text, done, match.begin - done).append(step.content);
    done = match.end;
  }
  return out.append(text, done);
}

std::string Normalizer::apply(std::string_view text, MatchBudget& budget) const {
  std::string out(text);
  for (const Step& step : steps_) {
    if (out.empty()) break;
    if (const auto* form = std::get_if<UnicodeForm>(&step)) {
      out = normalize_unicode(out, *form);
    } else if (const auto* prepend = std::get_if<Prepend>(&step)) {
      out.insert(0, prepend->content);
    } else {
      out = apply_replace(std::get<Replace>(step), out, budget);
    }
    if (out.size() > kMaxGrowth * (text.size() + kMaxContent))
      fail(ErrorCode::InvalidArgument, "the normalizer makes {} bytes of a text of {}", out.size(),
           text.size());
  }
  return out;
}

std::string Normalizer::description() const {
  std::string out;
  for (const Step& step : steps_) {
    if (!out.empty()) out += " + ";
    constexpr const char* kForms[] = {"NFC", "NFD", "NFKC", "NFKD"};
    if (const auto* form = std::get_if<UnicodeForm>(&step)) {
      out += kForms[static_cast<std::size_t>(*form)];
    } else {
      out += std::holds_alternative<Prepend>(step) ? "Prepend" : "Replace";
    }
  }
  return out.empty() ? "no normalizer" : out;
}

}  // namespace moeflux::text
