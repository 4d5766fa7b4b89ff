#include "engine/tokenizer.h"

#include "core/error.h"
#include "io/file.h"
#include "io/path.h"

namespace moeflux {
namespace engine {
namespace {

constexpr std::uint64_t kMaxTokenizerBytes = 256u << 20;  // published files reach 35 MB
constexpr std::uint64_t kMaxConfigBytes = 64u << 20;

}  // namespace

std::optional<text::Tokenizer> load_tokenizer(const std::filesystem::path& folder) {
  const auto main = folder / "tokenizer.json", config = folder / "tokenizer_config.json";
  if (io::path_kind(main) == io::PathKind::Missing) return std::nullopt;
  std::string config_text;
  if (io::path_kind(config) != io::PathKind::Missing) config_text = io::read_text_file(config, kMaxConfigBytes);
  return text::Tokenizer::from_json(io::read_text_file(main, kMaxTokenizerBytes), config_text, folder.string());
}

}  // namespace engine

Tokenizer::Tokenizer(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Tokenizer Tokenizer::open(const std::filesystem::path& model) {
  if (io::path_kind(model) != io::PathKind::Folder) fail(ErrorCode::InvalidArgument, "{}: no such folder", model.string());
  auto text = engine::load_tokenizer(model);
  if (!text) fail(ErrorCode::InvalidArgument, "{}: the folder has no tokenizer.json", model.string());
  return Tokenizer(std::make_shared<const Impl>(Impl{std::move(*text)}));
}

std::vector<TokenId> Tokenizer::encode(std::string_view text, bool parse_special) const {
  return impl_->text.encode(text, {.parse_special = parse_special, .add_bos = false});
}

std::string Tokenizer::decode(std::span<const TokenId> tokens, bool skip_special) const { return impl_->text.decode(tokens, skip_special); }
std::string Tokenizer::token_text(TokenId token) const { return impl_->text.token_bytes(token); }
std::size_t Tokenizer::vocab_size() const { return impl_->text.vocab_size(); }

}  // namespace moeflux
