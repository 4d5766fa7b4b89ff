// Looking things up in config.json as the families do: aliases, nested text_config, and an account of
// which keys were understood, so that nothing that changes the meaning is skipped in silence.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/json_fwd.h"

namespace moeflux::format {

// A view of the model keys of one config.json. Keys come from `text_config` when that is an object,
// else from the root; `tie_word_embeddings`, `quantization` and `quantization_config` from the root
// first. A null value counts as absent. Every look-up marks its keys as understood, found or not.
//
// Holds a pointer to `root`, which must outlive it. Not for several threads at once (look-ups mark).
class ModelConfig {
 public:
  // `origin` (a path) starts every message. InvalidModel: the root or text_config is not an object.
  ModelConfig(const Json& root, std::string origin);

  // model_type of the root, and of text_config (equal when there is none). InvalidModel when missing.
  std::string model_type() const;
  std::string text_model_type() const;

  // First key present of the aliases; nullopt when none is. Wrong types are InvalidModel. When several are
  // present the first decides, also when they differ (moe_intermediate_size before intermediate_size).
  std::optional<std::int64_t> find_int(std::initializer_list<std::string_view> keys);
  std::optional<double> find_number(std::initializer_list<std::string_view> keys);
  std::optional<bool> find_bool(std::initializer_list<std::string_view> keys);
  std::optional<std::string> find_string(std::initializer_list<std::string_view> keys);
  const Json* find(std::string_view key);  // any type; nullptr when absent or null

  // Required and inside [min, max], else InvalidModel naming the (first) key.
  std::int64_t need_int(std::initializer_list<std::string_view> keys, std::int64_t min, std::int64_t max);
  double need_number(std::initializer_list<std::string_view> keys, double min, double max);

  // Rejects (Unsupported, names key and value) any of these keys that is present with another value than
  // the harmless one. For keys known to change the meaning and not implemented for the family.
  void require_absent_or(std::string_view key, const Json& harmless);

  // Marks keys as known to be without effect in this family.
  void accept(std::initializer_list<std::string_view> keys);
  // Keys that nobody asked for and that are not on the list of keys known never to change a forward
  // pass, in file order, those of the text part first: for one warning. Keys that stand beside
  // text_config are not read from there, so they count as asked for only when accepted, when the text
  // part says the same, or when the root comes first for them.
  std::vector<std::string> unknown_keys() const;
  // Throws Unsupported for the first key that is known to change the meaning of some model and was not
  // asked for by this family (softcapping, multipliers, sparse attention indexers, ..) and has not the
  // value that means "nothing special". Plain sizes (hidden_size, intermediate_size, ..) are left to
  // unknown_keys(): the shapes of the tensors betray them.
  void reject_meaningful_leftovers() const;

  const std::string& origin() const noexcept { return origin_; }

 private:
  struct Leftover {
    std::string_view key;
    const Json* value;
    bool beside_text;  // in the root although there is a text_config
    bool changes;      // known to change the meaning, else unknown
  };
  const Json* lookup(std::string_view key) const;  // without marking
  // The object that has the first present of the keys, and that key; marks all of them.
  std::pair<const Json*, std::string_view> holder(std::initializer_list<std::string_view> keys);
  std::vector<Leftover> leftovers() const;

  const Json* root_;
  const Json* text_;
  std::string origin_;
  std::set<std::string, std::less<>> understood_;
  std::set<std::string, std::less<>> accepted_;
};

// The quantization of one tensor as config.json states it (a cross-check; shapes decide).
struct QuantParams {
  std::int64_t bits = 0;
  std::int64_t group_size = 0;
  std::string mode = "affine";
};

// `quantization` (or `quantization_config` in the MLX form) with per-module overrides: of the root, else of
// text_config. Missing values: mode affine; group_size/bits affine 64/4, mxfp4 32/4, nvfp4 16/4,
// mxfp8 32/8, in the defaults and in each override alike (an override inherits nothing).
class QuantConfig {
 public:
  // Absent: nothing is quantized by this config. A quant_method other than MLX's is kept as its name.
  QuantConfig() = default;
  // InvalidModel: wrong types, bits outside 1..32, group_size outside 1..65536. Unsupported: another mode; fp8 in other
  // blocks than 128 x 128; compressed-tensors other than packed symmetric 4 bits in groups of 32.
  QuantConfig(const Json& root, const std::string& origin);
  bool present() const noexcept { return present_; }
  const std::string& quant_method() const noexcept { return quant_method_; }
  // Keys of the MLX form that are neither parameters nor modules: for one warning.
  const std::vector<std::string>& unknown_keys() const noexcept { return unknown_keys_; }
  // For a module path without ".weight"; nullopt when the config says false for it or has no defaults.
  std::optional<QuantParams> lookup(std::string_view module) const;

 private:
  bool present_ = false;
  std::string quant_method_;
  std::optional<QuantParams> defaults_;
  std::vector<std::pair<std::string, std::optional<QuantParams>>> overrides_;  // sorted by module
  std::vector<std::string> unknown_keys_;
};

// generation_config.json: sampling defaults and stop ids (eos_token_id may be one id or a list). Wrong types
// and negative ids are InvalidModel; whether a sampler accepts the numbers is the sampler's matter.
struct GenerationDefaults {
  std::vector<std::int64_t> eos_token_ids;
  std::optional<double> temperature, top_p, min_p, repetition_penalty;
  std::optional<std::int64_t> top_k;
  std::optional<bool> do_sample;
};
GenerationDefaults parse_generation_config(const Json& object, const std::string& origin);

}  // namespace moeflux::format
