#include "cli/json_out.h"

#include <nlohmann/json.hpp>

#include "cli/common.h"
#include "cli/terminal.h"

namespace moeflux::cli {

using Json = nlohmann::ordered_json;

void write_json(const Json& object) {
  write_out(object.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
}

Json ids_json(std::span<const TokenId> tokens) {
  Json ids = Json::array();
  for (const TokenId token : tokens) ids.push_back(raw(token));
  return ids;
}

Json stats_json(const SessionStats& stats) {
  return {{"prefill_tokens", stats.prefill_tokens},
          {"prefill_ns", stats.prefill_ns},
          {"prefill_tokens_per_second", stats.prefill_rate()},
          {"decode_tokens", stats.decode_tokens},
          {"decode_ns", stats.decode_ns},
          {"decode_tokens_per_second", stats.decode_rate()},
          {"expert_requests", stats.expert_requests},
          {"expert_hits", stats.expert_hits},
          {"hit_rate", stats.hit_rate()},
          {"bytes_read", stats.bytes_read},
          {"bytes_read_per_token", stats.bytes_read_per_token()},
          {"stall_ns", stats.stall_ns},
          {"logits_hash", hash_text(stats.logits_hash)}};
}

}  // namespace moeflux::cli
