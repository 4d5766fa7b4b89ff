// pack_model(): trunk, records and small files into a new folder, the index last.
#include <moeflux/engine.h>
#include <moeflux/pack.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>

#include "core/error.h"
#include "core/units.h"
#include "engine/pack_parts.h"
#include "format/safetensors.h"
#include "io/new_folder.h"
#include "io/path.h"
#include "io/read_ahead.h"
#include "io/stream_file.h"
#include "model/binder.h"
#include "model/family.h"
#include "store/slot_layout.h"

namespace moeflux {
namespace {

using format::FolderTensor;
using format::ModelFolder;

// What a model may bring beside its weights, as it stands.
constexpr std::array kSmallFiles = {"config.json",           "generation_config.json",  "tokenizer.json", "tokenizer_config.json",
                                    "special_tokens_map.json", "added_tokens.json",      "vocab.json",     "merges.txt",
                                    "tokenizer.model",       "chat_template.jinja",     "chat_template.json"};
constexpr std::uint64_t kMaxSmallFile = 256u << 20;
constexpr std::uint64_t kIndexRoom = 1u << 20;  // of the text, and what folders and half-filled blocks take

// What the trunk reads, whole tensors in the order of the files.
std::vector<const FolderTensor*> trunk_tensors(const ModelFolder& folder, const model::Binding& binding) {
  std::set<std::pair<std::uint32_t, std::uint64_t>> used;  // file, offset
  const auto use = [&](const format::Extent& x) {
    if (x.bytes > 0) used.emplace(x.file, x.offset);
  };
  struct Visitor {
    decltype(use)& use_extent;
    void operator()(const store::MatrixSource& m) const { use_extent(m.data), use_extent(m.scales), use_extent(m.biases); }
    void operator()(const store::VectorSource& v) const { use_extent(v.data); }
  };
  model::for_each_tensor(binding.sources, Visitor{use});
  std::vector<const FolderTensor*> out;
  for (const FolderTensor& t : folder.tensors())
    if (t.info.bytes > 0 && used.contains({t.file, t.info.offset})) out.push_back(&t);
  return out;
}

// All experts, layer by layer.
class RecordWalk {
 public:
  struct At {
    LayerIdx layer;
    ExpertIdx expert;
  };
  explicit RecordWalk(const store::ExpertCatalog& catalog) : catalog_(catalog) {}

  std::optional<At> next() {
    while (layer_ < catalog_.layers.size() && expert_ == catalog_.layers[layer_].n_experts) {
      ++layer_;
      expert_ = 0;
    }
    if (layer_ == catalog_.layers.size()) return std::nullopt;
    return At{LayerIdx(static_cast<std::int32_t>(layer_)), ExpertIdx(static_cast<std::int32_t>(expert_++))};
  }

 private:
  const store::ExpertCatalog& catalog_;
  std::size_t layer_ = 0;
  std::int64_t expert_ = 0;
};

class Packer {
 public:
  Packer(const PackOptions& options, const ModelFolder& folder, const model::Binding& binding)
      : options_(options), folder_(folder), binding_(binding), tensors_(trunk_tensors(folder, binding)), layout_(binding.experts) {
    std::vector<format::TensorInfo> infos;
    for (const FolderTensor* t : tensors_) infos.push_back(t->info);
    std::map<std::string, std::string> metadata;
    if (!folder.writer_format().empty()) metadata["format"] = folder.writer_format();
    trunk_header_ = format::safetensors_header(infos, metadata, (options.out / format::kPackTrunkName).string());
    for (std::uint32_t i = 0; i < folder.n_files(); ++i) files_.push_back(folder.file(i).path());
    make_plan();
  }

  PackResult run() {
    remove_leftovers();
    io::NewFolder out(options_.out, format::kPackUnfinishedName);
    plan_.free_bytes = out.free_bytes();
    if (options_.on_plan) options_.on_plan(plan_);
    if (plan_.total_bytes() > plan_.free_bytes)
      fail(ErrorCode::Io, "{}: not enough room: {} bytes needed, {} free", options_.out.string(), plan_.total_bytes(), plan_.free_bytes);
    copy_small_files(out);
    write_trunk(out.path() / format::kPackTrunkName);
    write_experts(out.path() / format::kPackExpertsName);
    index_.writer = std::string("moeflux ") + version();
    out.write_file(format::kPackIndexName, format::write_pack_index(index_));
    report(plan_.total_bytes() - done_);
    out.commit();
    return {plan_, digest_text(index_.model_id())};
  }

 private:
  void make_plan() {
    plan_.n_tensors = static_cast<std::int64_t>(tensors_.size());
    plan_.trunk_bytes = trunk_header_.size();
    for (const FolderTensor* t : tensors_) plan_.trunk_bytes += t->info.bytes;
    std::set<std::pair<std::uint32_t, std::uint64_t>> packed;  // files and offsets that records are made of
    for (const store::ExpertLayer& l : binding_.experts.layers) {
      plan_.n_records += l.n_experts;
      plan_.expert_bytes += static_cast<std::uint64_t>(l.n_experts) * l.layout.bytes;
      for (const store::RecordPiece& p : l.pieces) packed.emplace(p.source.file, p.source.offset);
    }
    for (const FolderTensor& t : folder_.tensors()) {
      const auto first = packed.lower_bound({t.file, t.info.offset});
      const bool in_record = first != packed.end() && first->first == t.file && first->second < t.info.offset + t.info.bytes;
      if (!in_record) ++plan_.n_left_out;
    }
    plan_.n_left_out -= plan_.n_tensors;
    plan_.other_bytes = kIndexRoom + static_cast<std::uint64_t>(plan_.n_records + plan_.n_tensors) * sizeof(Digest);
    for (const char* name : kSmallFiles)
      if (io::path_kind(folder_.path() / name) == io::PathKind::File) plan_.other_bytes += io::File::open(folder_.path() / name).size();
  }

  // What a killed process left behind is ours to remove; what a living one writes is not.
  void remove_leftovers() const {
    for (const io::TemporaryFolder& t : io::temporary_folders(options_.out, format::kPackUnfinishedName)) {
      if (t.in_use)
        fail(ErrorCode::InvalidArgument, "{}: another process is writing a pack there; if none is, remove {}", options_.out.string(), t.path.string());
      io::remove_folder(t.path);
      if (options_.log)
        options_.log(LogLevel::Warning, fmt::format("removed {}, {} of an unfinished pack", t.path.string(), format_bytes(t.bytes)));
    }
  }

  void report(std::uint64_t more) {
    done_ += more;
    if (options_.progress) options_.progress("packing", std::min(done_, plan_.total_bytes()), plan_.total_bytes());
  }

  void copy_small_files(io::NewFolder& out) {
    for (const char* name : kSmallFiles) {
      if (io::path_kind(folder_.path() / name) != io::PathKind::File) continue;
      const std::string text = io::read_text_file(folder_.path() / name, kMaxSmallFile);
      out.write_file(name, text);
      index_.files.push_back({name, text.size(), digest_bytes(text)});
      report(text.size());
    }
  }

  void write_trunk(const std::filesystem::path& path) {
    io::StreamFile file(path, plan_.trunk_bytes);
    const auto header = std::as_bytes(std::span(trunk_header_));
    file.append(header);
    index_.trunk_bytes = plan_.trunk_bytes;
    index_.trunk_header_bytes = header.size();
    index_.trunk_header = digest_bytes(header);
    report(header.size());

    engine::ChunkList chunks;
    for (const FolderTensor* t : tensors_) chunks.add(t->extent());
    io::ReadAhead reads(files_, engine::read_ahead(options_.io, engine::ChunkList::kJobBytes), [&](auto& parts) { return chunks.next(parts); });
    io::ReadAhead::Job job;
    for (const FolderTensor* t : tensors_) {
      DigestStream digest;
      for (std::uint64_t left = t->info.bytes; left > 0;) {
        reads.next(job);
        if (job.status != 0) fail_read(job, fmt::format("tensor {}", t->info.name));
        const std::span<const std::byte> data = job.data(0);
        digest.add(data);
        file.append(data);
        left -= data.size();
        report(data.size());
      }
      index_.trunk.push_back(digest.digest());
    }
    file.finish();
  }

  [[noreturn]] void fail_read(const io::ReadAhead::Job& job, const std::string& what) const {
    fail(ErrorCode::Io, "{}: {}: {}", files_[job.parts[job.failed].file].string(), what, engine::read_failure(job));
  }

  // The pieces of an expert that have to be read, each in its window.
  void read_parts(LayerIdx layer, ExpertIdx expert, std::vector<io::ReadPart>& parts) const {
    const auto pieces = binding_.experts.layer(layer).expert(expert);
    for (std::size_t p = 0; p < pieces.size(); ++p)
      if (store::SlotLayout::needs_read(pieces, p))
        parts.push_back({pieces[p].source.file, pieces[p].source.offset, pieces[p].source.bytes, layout_.window_at(layer, p)});
  }

  void gather(LayerIdx layer, ExpertIdx expert, const std::byte* memory, std::span<std::byte> record) const {
    const auto pieces = binding_.experts.layer(layer).expert(expert);
    for (std::size_t p = 0; p < pieces.size(); ++p) {
      const format::Extent& source = pieces[p].source;
      place_piece(pieces[p], {memory + layout_.window_at(layer, p) + source.offset % io::kDirectAlign, source.bytes}, record);
    }
    const store::ExpertView view = store::view_record(binding_.experts.layer(layer).layout, record.data());
    for (const quant::MatrixView* m : {&view.gate, &view.up, &view.down}) store::check_scales(*m, "scales");
  }

  void write_experts(const std::filesystem::path& path) {
    io::StreamFile file(path, plan_.expert_bytes);
    const Digest id = index_.model_id();
    RecordWalk walk(binding_.experts), written(binding_.experts);
    io::ReadAhead reads(files_, engine::read_ahead(options_.io, layout_.slot_bytes()), [&](auto& parts) {
      const auto at = walk.next();
      if (at) read_parts(at->layer, at->expert, parts);
      return at.has_value();
    });
    io::ReadAhead::Job job;
    std::vector<std::byte> record;
    while (const auto at = written.next()) {
      const store::ExpertLayer& source = binding_.experts.layer(at->layer);
      if (raw(at->expert) == 0) {
        record.assign(source.layout.bytes, std::byte{0});  // what lies between the pieces stays zero
        add_layer(raw(at->layer), source.layout);
      }
      const std::string name = fmt::format("layer {}, expert {}", raw(at->layer), raw(at->expert));
      reads.next(job);
      if (job.status != 0) fail_read(job, name);
      try {
        gather(at->layer, at->expert, job.memory, record);
      } catch (const Error& e) {
        fail(e.code(), "{}: {}: {}", files_[job.parts[0].file].string(), name, e.what());
      }
      index_.layers.back().digests.push_back(digest_bytes(record, format::record_seed(id, raw(at->layer), raw(at->expert))));
      file.append(record);
      report(record.size());
    }
    file.finish();
  }

  void add_layer(std::int32_t layer, const store::RecordLayout& layout) {
    const auto matrix = [](const store::RecordMatrix& m) { return format::PackMatrix{m.format, m.rows, m.cols}; };
    index_.layers.push_back({layer, index_.experts_bytes, layout.bytes, matrix(layout.gate), matrix(layout.up), matrix(layout.down),
                             layout.gate_bias.count > 0, {}});
    index_.experts_bytes += layout.bytes * static_cast<std::uint64_t>(binding_.experts.layer(LayerIdx(layer)).n_experts);
  }

  const PackOptions& options_;
  const ModelFolder& folder_;
  const model::Binding& binding_;
  const std::vector<const FolderTensor*> tensors_;
  const store::SlotLayout layout_;
  std::string trunk_header_;
  std::vector<std::filesystem::path> files_;
  PackPlan plan_;
  format::PackIndex index_;
  std::uint64_t done_ = 0;
};

}  // namespace

PackResult pack_model(const PackOptions& options) {
  const ModelFolder folder = ModelFolder::open(options.model);
  if (folder.pack() != nullptr) fail(ErrorCode::InvalidArgument, "{}: already a pack", options.model.string());
  const model::ParsedModel parsed = model::parse_model(folder);
  const model::Binding binding = model::bind(folder, parsed.spec, parsed.names);
  binding.require_complete(folder);
  if (options.log)
    for (const auto* list : {&folder.warnings(), &parsed.warnings})
      for (const std::string& w : *list) options.log(LogLevel::Warning, w);
  return Packer(options, folder, binding).run();
}

}  // namespace moeflux
