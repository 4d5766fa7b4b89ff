#include "text/tokenizer.h"

#include <algorithm>
#include <new>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/error.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/byte_alphabet.h"
#include "text/json_node.h"
#include "text/normalizer.h"
#include "text/post_processor.h"
#include "text/pretokenizer.h"
#include "text/utf8.h"

namespace moeflux::text {
namespace {

// Spelling doubles a text and the regex engine counts in int, so this leaves room.
constexpr std::size_t kMaxTextBytes = 256u << 20;

std::unordered_set<std::string_view> special_contents(const std::vector<AddedToken>& tokens) {
  std::unordered_set<std::string_view> contents;
  for (const AddedToken& token : tokens)
    if (token.special) contents.insert(token.content);
  return contents;
}

// Everything after the byte spelling relies on it, and decoding undoes it exactly once.
void require_byte_level(const JsonNode& root, const PreTokenizer& pre_tokenizer) {
  if (pre_tokenizer.byte_level_stages() != 1)
    root.reject(
        ErrorCode::Unsupported,
        "only byte-level tokenizers are supported: the pre-tokenizer must have one ByteLevel, found {}",
        pre_tokenizer.byte_level_stages());
  auto decoder = root.find("decoder");
  if (!decoder)
    root.reject(ErrorCode::Unsupported, "only byte-level tokenizers are supported: there is no decoder");
  if (decoder->type() == "Sequence") {
    const auto decoders = decoder->at("decoders").elements();
    if (decoders.size() != 1)
      decoder->reject(ErrorCode::Unsupported, "a sequence of {} decoders is not supported", decoders.size());
    decoder = decoders.front();
  }
  if (decoder->type() != "ByteLevel")
    decoder->reject(ErrorCode::Unsupported, "decoder {} is not supported", shown(decoder->type()));
}

// "eos_token" and its like: a string or an object with "content".
std::optional<std::string> named_token(const JsonNode& config, std::string_view key) {
  const auto node = config.find(key);
  if (!node) return std::nullopt;
  return std::string(node->is_object() ? node->at("content").string() : node->string());
}

}  // namespace

struct Tokenizer::Parts {
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  Bpe bpe;
  std::vector<AddedToken> added;
  std::unordered_map<TokenId, std::size_t> added_by_id;
  std::unordered_map<std::string_view, TokenId> added_by_content;  // views into `added`
  AddedTokenMatcher in_raw_text;
  AddedTokenMatcher in_normalized_text;
  PostProcessor post_processor;
  std::size_t vocab_size = 0;
  std::optional<TokenId> eos, bos;

  Parts(const JsonNode& root, std::vector<AddedToken> added_tokens);
  void index_added(const JsonNode& root);
  void build_matchers(const JsonNode& root);
  void read_config(const JsonNode& config);
  void read_post_processor(const JsonNode& root);

  bool has(TokenId id) const { return bpe.vocab().has(id) || added_by_id.contains(id); }
  std::optional<TokenId> find(std::string_view token) const {
    const auto it = added_by_content.find(token);
    return it != added_by_content.end() ? std::optional(it->second) : bpe.vocab().find(token);
  }
  void encode_part(std::string_view text, PieceCache& cache, MatchBudget& budget,
                   std::vector<TokenId>& out) const;
  void append_bytes(TokenId id, bool skip_special, std::string& out) const;
};

Tokenizer::Parts::Parts(const JsonNode& root, std::vector<AddedToken> added_tokens)
    : bpe(Bpe::parse(root.at("model"), special_contents(added_tokens))), added(std::move(added_tokens)) {
  if (const auto node = root.find("normalizer")) normalizer = Normalizer::parse(*node);
  if (const auto node = root.find("pre_tokenizer")) pre_tokenizer = PreTokenizer::parse(*node);
  require_byte_level(root, pre_tokenizer);
  index_added(root);
  build_matchers(root);
  read_post_processor(root);
}

void Tokenizer::Parts::index_added(const JsonNode& root) {
  vocab_size = bpe.vocab().id_end();
  for (std::size_t i = 0; i < added.size(); ++i) {
    const AddedToken& token = added[i];
    const auto in_vocab = bpe.vocab().find(token.content);
    if (in_vocab && *in_vocab != token.id)
      root.reject(ErrorCode::InvalidModel, "added token {} has id {}, but {} in the vocabulary",
                  shown(token.content), raw(token.id), raw(*in_vocab));
    if (!in_vocab && bpe.vocab().has(token.id))
      root.reject(ErrorCode::InvalidModel, "added token {} has id {}, which is {} in the vocabulary",
                  shown(token.content), raw(token.id), shown(bpe.vocab().token(token.id)));
    added_by_id.emplace(token.id, i);
    added_by_content.emplace(token.content, token.id);
    vocab_size = std::max(vocab_size, static_cast<std::size_t>(raw(token.id)) + 1);
  }
}

void Tokenizer::Parts::build_matchers(const JsonNode& root) {
  for (const AddedToken& token : added) {
    if (!token.normalized) {
      in_raw_text.add(token, token.content);
      continue;
    }
    MatchBudget budget(token.content.size());
    const std::string content = normalizer.apply(token.content, budget);
    if (content.empty())
      root.reject(ErrorCode::InvalidModel, "the normalizer leaves nothing of added token {}",
                  shown(token.content));
    in_normalized_text.add(token, content);
  }
}

void Tokenizer::Parts::read_post_processor(const JsonNode& root) {
  const auto node = root.find("post_processor");
  if (!node) return;
  post_processor = PostProcessor::parse(*node);
  for (const auto* ids : {&post_processor.prefix, &post_processor.suffix})
    for (const TokenId id : *ids)
      if (!has(id)) node->reject(ErrorCode::InvalidModel, "token id {} does not exist", raw(id));
}

void Tokenizer::Parts::read_config(const JsonNode& config) {
  const auto look_up = [&](std::string_view key) -> std::optional<TokenId> {
    const auto name = named_token(config, key);
    if (!name) return std::nullopt;
    const auto id = find(*name);
    if (!id)
      config.at(key).reject(ErrorCode::InvalidModel, "{} is not a token of tokenizer.json", shown(*name));
    return id;
  };
  eos = look_up("eos_token");
  bos = look_up("bos_token");
  const bool in_template = !post_processor.prefix.empty() || !post_processor.suffix.empty();
  if (config.boolean_or("add_bos_token", false) && bos && !in_template) post_processor.prefix.push_back(*bos);
}

void Tokenizer::Parts::encode_part(std::string_view text, PieceCache& cache, MatchBudget& budget,
                                   std::vector<TokenId>& out) const {
  const PreTokens tokens = pre_tokenizer.run(text, budget);
  for (std::size_t i = 0; i < tokens.pieces.size(); ++i) bpe.encode(tokens.piece(i), cache, out);
}

void Tokenizer::Parts::append_bytes(TokenId id, bool skip_special, std::string& out) const {
  if (const auto it = added_by_id.find(id); it != added_by_id.end()) {
    const AddedToken& token = added[it->second];
    if (!(skip_special && token.special)) out.append(token.content);
    return;
  }
  if (!bpe.vocab().has(id))
    fail(ErrorCode::InvalidArgument, "token id {} does not exist, the vocabulary has ids below {}", raw(id),
         vocab_size);
  out.append(unspell(bpe.vocab().token(id)));
}

Tokenizer::Tokenizer(std::unique_ptr<const Parts> parts) : parts_(std::move(parts)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Tokenizer Tokenizer::from_json(std::string_view tokenizer_json, std::string_view tokenizer_config_json,
                               const std::string& origin) {
  try {
    const JsonDocument document(tokenizer_json, origin + "/tokenizer.json");
    const JsonNode root = document.root();
    const auto added_node = root.find("added_tokens");
    auto parts = std::make_unique<Parts>(
        root, added_node ? parse_added_tokens(*added_node) : std::vector<AddedToken>());
    if (!tokenizer_config_json.empty()) {
      const JsonDocument config(tokenizer_config_json, origin + "/tokenizer_config.json");
      parts->read_config(config.root());
    }
    return Tokenizer(std::move(parts));
  } catch (const std::bad_alloc&) {
    fail(ErrorCode::OutOfMemory, "{}: no memory for the tokenizer", origin);
  }
}

std::vector<TokenId> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  if (text.size() > kMaxTextBytes)
    fail(ErrorCode::InvalidArgument, "a text of {} bytes, the tokenizer takes {} at most", text.size(),
         kMaxTextBytes);
  const Parts& parts = *parts_;
  const std::string mended = is_valid_utf8(text) ? std::string() : replace_invalid_utf8(text);
  if (!mended.empty()) text = mended;

  std::vector<TokenId> ids;
  if (options.add_bos) ids = parts.post_processor.prefix;
  PieceCache cache;
  MatchBudget budget(text.size());
  for (const Segment& raw_part : parts.in_raw_text.split(text, options.parse_special)) {
    if (raw_part.token) {
      ids.push_back(*raw_part.token);
      continue;
    }
    const std::string normalized =
        parts.normalizer.apply(text.substr(raw_part.begin, raw_part.end - raw_part.begin), budget);
    for (const Segment& part : parts.in_normalized_text.split(normalized, options.parse_special)) {
      if (part.token) {
        ids.push_back(*part.token);
      } else {
        parts.encode_part(std::string_view(normalized).substr(part.begin, part.end - part.begin), cache,
                          budget, ids);
      }
    }
  }
  if (options.add_bos)
    ids.insert(ids.end(), parts.post_processor.suffix.begin(), parts.post_processor.suffix.end());
  return ids;
}

std::string Tokenizer::decode(std::span<const TokenId> ids, bool skip_special) const {
  std::string bytes;
  for (const TokenId id : ids) parts_->append_bytes(id, skip_special, bytes);
  return is_valid_utf8(bytes) ? bytes : replace_invalid_utf8(bytes);
}

std::string Tokenizer::token_bytes(TokenId id) const {
  std::string bytes;
  parts_->append_bytes(id, false, bytes);
  return bytes;
}

bool Tokenizer::is_special(TokenId id) const {
  const auto it = parts_->added_by_id.find(id);
  return it != parts_->added_by_id.end() && parts_->added[it->second].special;
}

bool Tokenizer::has_token(TokenId id) const { return parts_->has(id); }
std::optional<TokenId> Tokenizer::find(std::string_view token) const { return parts_->find(token); }
std::size_t Tokenizer::vocab_size() const { return parts_->vocab_size; }
std::optional<TokenId> Tokenizer::eos() const { return parts_->eos; }
std::optional<TokenId> Tokenizer::bos() const { return parts_->bos; }

std::string Tokenizer::description() const {
  return fmt::format("byte-level BPE, {} tokens, {} merges, {} added, {}", parts_->bpe.vocab().size(),
                     parts_->bpe.n_merges(), parts_->added.size(), parts_->normalizer.description());
}

}  // namespace moeflux::text
