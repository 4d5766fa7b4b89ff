#include "cli/synth/model_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <span>
#include <system_error>

#include "cli/fail.h"
#include "cli/synth/tokenizer_files.h"
#include "io/stream_file.h"

namespace moeflux::cli::synth {
namespace {

// Small files: configuration, tokenizer, index.
constexpr std::uint64_t kSmallFileBytes = 4 << 20;

std::string header_text(const Plan& plan, const Shard& shard) {
  Json json = {{"__metadata__", {{"format", "mlx"}}}};
  std::uint64_t offset = 0;
  for (std::size_t i = shard.first; i < shard.last; ++i) {
    const PlannedTensor& tensor = plan.tensors[i];
    json[tensor.name] = {{"dtype", tensor.dtype},
                         {"shape", tensor.shape},
                         {"data_offsets", Json::array({offset, offset + tensor.bytes})}};
    offset += tensor.bytes;
  }
  std::string text = json.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // keeps the data aligned
  const std::uint64_t length = text.size();
  std::string prefix(sizeof(length), '\0');
  std::memcpy(prefix.data(), &length, sizeof(length));
  return prefix + text;
}

void write_shard(const io::NewFolder& folder, const Plan& plan, const Shard& shard, std::uint64_t& done,
                 const WriteProgress& progress) {
  io::StreamFile file(folder.path() / shard.file, shard.bytes);
  file.append(std::as_bytes(std::span(shard.header)));
  done += shard.header.size();
  std::vector<std::byte> block(kBlockBytes);
  for (std::size_t i = shard.first; i < shard.last; ++i) {
    const PlannedTensor& tensor = plan.tensors[i];
    for (std::uint64_t at = 0; at < tensor.bytes; at += kBlockBytes) {
      const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(kBlockBytes, tensor.bytes - at));
      fill_block(tensor.fill, at, std::span(block).first(n));
      file.append(std::span(block).first(n));
      done += n;
      progress(done);
    }
  }
  file.finish();
}

Json index_json(const Plan& plan, const std::vector<Shard>& shards) {
  Json map = Json::object();
  for (const Shard& shard : shards)
    for (std::size_t i = shard.first; i < shard.last; ++i) map[plan.tensors[i].name] = shard.file;
  return {{"metadata", {{"total_size", plan.tensor_bytes}}}, {"weight_map", map}};
}

// Everything but the weights; config.json comes last: without it nothing takes the folder for a model.
void write_small_files(io::NewFolder& folder, const Plan& plan, const std::vector<Shard>& shards) {
  if (shards.size() > 1) folder.write_file("model.safetensors.index.json", index_json(plan, shards).dump(1));
  folder.write_file("tokenizer.json", tokenizer_json().dump(1));
  folder.write_file("generation_config.json", generation_config_json().dump(1));
  folder.write_file("config.json", plan.config.dump(1));
}

}  // namespace

std::vector<Shard> cut_shards(const Plan& plan, std::uint64_t shard_bytes) {
  std::vector<Shard> shards;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < plan.tensors.size(); ++i) {
    const std::uint64_t more = plan.tensors[i].bytes;
    if (shards.empty() || bytes + more > shard_bytes) {
      shards.emplace_back().first = i;
      bytes = 0;
    }
    bytes += more;
    shards.back().last = i + 1;
    shards.back().bytes = bytes;
  }
  for (std::size_t i = 0; i < shards.size(); ++i) {
    shards[i].file = shards.size() == 1
                         ? "model.safetensors"
                         : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    shards[i].header = header_text(plan, shards[i]);
    shards[i].bytes += shards[i].header.size();
  }
  return shards;
}

std::uint64_t total_bytes(const std::vector<Shard>& shards) {
  std::uint64_t sum = kSmallFileBytes;
  for (const Shard& shard : shards) sum += shard.bytes;
  return sum;
}

void write_model(io::NewFolder& folder, const Plan& plan, const std::vector<Shard>& shards,
                 const WriteProgress& progress) {
  std::uint64_t done = 0;
  for (const Shard& shard : shards) write_shard(folder, plan, shard, done, progress);
  write_small_files(folder, plan, shards);
}

void write_headers(io::NewFolder& folder, const Plan& plan, const std::vector<Shard>& shards) {
  for (const Shard& shard : shards) {
    folder.write_file(shard.file.c_str(), shard.header);
    std::error_code error;
    std::filesystem::resize_file(folder.path() / shard.file, shard.bytes, error);
    if (error) fail(ErrorCode::Io, "{}: cannot set its size: {}", shard.file, error.message());
  }
  write_small_files(folder, plan, shards);
}

}  // namespace moeflux::cli::synth
