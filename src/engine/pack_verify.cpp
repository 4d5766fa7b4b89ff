// verify_pack(): every byte of a pack against its checksum.
#include <moeflux/pack.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "engine/pack_parts.h"
#include "format/pack_index.h"
#include "format/printable.h"
#include "format/safetensors.h"
#include "io/path.h"

namespace moeflux {
namespace {

using format::PackIndex;

// Bytes with a checksum of their own.
struct Piece {
  std::string name;  // inside the file; empty: all of it
  format::Extent extent;
  Digest digest;
  std::uint64_t seed = 0;
};

class Verifier {
 public:
  Verifier(const VerifyOptions& options, PackIndex index) : options_(options), index_(std::move(index)) {}

  VerifyResult run() {
    std::vector<Piece> pieces;
    for (const format::PackedFile& f : index_.files)
      if (const auto file = open(f.name, f.bytes)) pieces.push_back({"", {*file, 0, f.bytes}, f.digest, 0});
    const auto trunk = open(format::kPackTrunkName, index_.trunk_bytes), experts = open(format::kPackExpertsName, index_.experts_bytes);
    if (trunk) pieces.push_back({"header", {*trunk, 0, index_.trunk_header_bytes}, index_.trunk_header, 0});
    const bool intact = check(pieces);  // the header is the last of them
    pieces.clear();
    if (trunk && intact) add_tensors(*trunk, pieces);
    if (experts) add_records(*experts, pieces);
    check(pieces);
    return result_;
  }

 private:
  void fault(std::string_view text) {
    ++result_.n_faults;
    if (options_.on_fault) options_.on_fault(text);
  }

  // The number of a file that can be read; none, and a fault, otherwise. One of a wrong size may still hold what it should.
  std::optional<std::uint32_t> open(const std::string& name, std::uint64_t bytes) {
    const std::filesystem::path path = options_.pack / name;
    try {
      const std::uint64_t size = io::File::open(path).size();
      if (size != bytes) fault(fmt::format("{}: {} bytes long, the index says {}", path.string(), size, bytes));
    } catch (const Error& e) {
      fault(e.what());
      return std::nullopt;
    }
    files_.push_back(path);
    total_ += bytes;
    return static_cast<std::uint32_t>(files_.size() - 1);
  }

  void add_tensors(std::uint32_t file, std::vector<Piece>& pieces) {
    format::SafetensorsHeader header;
    try {
      header = format::read_safetensors_header(io::File::open(files_[file]));
    } catch (const Error& e) {
      return fault(e.what());
    }
    if (header.tensors.size() != index_.trunk.size())
      return fault(fmt::format("{}: {} tensors, the index has checksums of {}", files_[file].string(), header.tensors.size(), index_.trunk.size()));
    for (std::size_t i = 0; i < index_.trunk.size(); ++i) {
      const format::TensorInfo& t = header.tensors[i];
      pieces.push_back({"tensor " + format::in_quotes(t.name), {file, t.offset, t.bytes}, index_.trunk[i], 0});
    }
  }

  void add_records(std::uint32_t file, std::vector<Piece>& pieces) {
    const Digest id = index_.model_id();
    for (const format::PackLayer& l : index_.layers)
      for (std::size_t e = 0; e < l.digests.size(); ++e)
        pieces.push_back({fmt::format("layer {}, expert {}", l.layer, e), {file, l.offset + e * l.record_bytes, l.record_bytes}, l.digests[e],
                          format::record_seed(id, l.layer, static_cast<std::int32_t>(e))});
    result_.n_records = static_cast<std::int64_t>(index_.n_records());
  }

  // Whether the last piece is as it should be.
  bool check(const std::vector<Piece>& pieces) {
    engine::ChunkList chunks;
    for (const Piece& p : pieces) chunks.add(p.extent);
    io::ReadAhead reads(files_, engine::read_ahead(options_.io, engine::ChunkList::kJobBytes), [&](auto& parts) { return chunks.next(parts); });
    bool intact = true;
    for (const Piece& p : pieces) {
      const std::string broken = check(p, reads);
      intact = broken.empty();
      if (!intact) fault(fmt::format("{}: {}{}{}", files_[p.extent.file].string(), p.name, p.name.empty() ? "" : ": ", broken));
    }
    return intact;
  }

  // What is wrong with it; empty: nothing.
  std::string check(const Piece& piece, io::ReadAhead& reads) {
    DigestStream digest(piece.seed);
    std::string broken;
    io::ReadAhead::Job job;
    for (std::uint64_t left = piece.extent.bytes; left > 0;) {
      reads.next(job);
      if (job.status == 0)
        digest.add(job.data(0));
      else if (broken.empty())
        broken = engine::read_failure(job);
      left -= job.parts[0].bytes;
      result_.bytes += job.parts[0].bytes;
      if (options_.progress) options_.progress("verifying", std::min(result_.bytes, total_), total_);
    }
    if (broken.empty() && digest.digest() != piece.digest)
      broken = fmt::format("{} bytes at offset {} do not match their checksum", piece.extent.bytes, piece.extent.offset);
    return broken;
  }

  const VerifyOptions& options_;
  const PackIndex index_;
  std::vector<std::filesystem::path> files_;
  std::uint64_t total_ = 0;
  VerifyResult result_;
};

}  // namespace

VerifyResult verify_pack(const VerifyOptions& options) {
  const std::filesystem::path index = options.pack / format::kPackIndexName;
  if (io::path_kind(options.pack) != io::PathKind::Folder) fail(ErrorCode::InvalidArgument, "{}: no such folder", options.pack.string());
  if (io::path_kind(options.pack / format::kPackUnfinishedName) != io::PathKind::Missing)
    fail(ErrorCode::InvalidArgument, "{}: an unfinished pack", options.pack.string());
  if (io::path_kind(index) == io::PathKind::Missing)
    fail(ErrorCode::InvalidArgument, "{}: not a pack: it has no {}", options.pack.string(), format::kPackIndexName);
  PackIndex read;
  try {
    read = format::read_pack_index(io::File::open(index));
  } catch (const Error& e) {
    if (e.code() != ErrorCode::InvalidModel) throw;
    VerifyResult result;
    result.n_faults = 1;
    if (options.on_fault) options.on_fault(e.what());
    return result;
  }
  return Verifier(options, std::move(read)).run();
}

}  // namespace moeflux
