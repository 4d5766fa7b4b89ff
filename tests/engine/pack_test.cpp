// Packs: the same bytes of logits as the model they were made from, and no damage that goes unnoticed.
#include <gtest/gtest.h>
#include <moeflux/pack.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <random>

#include "format/pack_index.h"
#include "support/edit_model.h"
#include "support/expect_error.h"
#include "support/fault_reader.h"
#include "support/loaded_model.h"
#include "support/temp_dir.h"

namespace moeflux::test {
namespace {

namespace fs = std::filesystem;

const char* const kFixture = "qwen3_5_moe-mlx4";

std::vector<std::string> models() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(fixtures()))
    if (fs::exists(entry.path() / "model.safetensors")) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

PackResult pack(const fs::path& model, const fs::path& out) {
  PackOptions o;
  o.model = model;
  o.out = out;
  return pack_model(o);
}

std::vector<std::string> faults_of(const fs::path& path) {
  std::vector<std::string> faults;
  VerifyOptions o;
  o.pack = path;
  o.on_fault = [&](std::string_view text) { faults.emplace_back(text); };
  const std::int64_t n_faults = verify_pack(o).n_faults;
  EXPECT_EQ(n_faults, static_cast<std::int64_t>(faults.size()));
  return faults;
}

void flip(const fs::path& path, std::uint64_t bit) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(bit / 8));
  char c = 0;
  file.get(c);
  c = static_cast<char>(c ^ (1 << bit % 8));
  file.seekp(static_cast<std::streamoff>(bit / 8));
  file.put(c);
  file.close();
  ASSERT_FALSE(file.fail());
}

// Damages bits of a file one at a time; `seen` must be true for each.
template <class F>
void expect_all_seen(const fs::path& file, const std::vector<std::uint64_t>& bits, const F& seen) {
  for (const std::uint64_t bit : bits) {
    flip(file, bit);
    EXPECT_TRUE(seen()) << file.filename() << ", bit " << bit;
    flip(file, bit);
  }
  EXPECT_FALSE(seen()) << file.filename() << ": whole again";
}

// First, last and some in between.
std::vector<std::uint64_t> some_bits(std::uint64_t first_byte, std::uint64_t bytes, std::size_t n) {
  std::mt19937_64 random(first_byte + bytes);
  std::vector<std::uint64_t> bits{first_byte * 8, (first_byte + bytes) * 8 - 1};
  while (bits.size() < n) bits.push_back(first_byte * 8 + random() % (bytes * 8));
  return bits;
}

template <class F>
bool is_refused(const F& f) {
  try {
    f();
    return false;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::InvalidModel) << e.what();
    return true;
  }
}

class Pack : public testing::TestWithParam<std::string> {};

// Every family and format, all experts in memory and streamed through the fewest slots that can work.
TEST_P(Pack, SameBytesAsTheModel) {
  const TempDir dir;
  auto tokens = golden_tokens(GetParam());
  tokens.resize(std::min<std::size_t>(tokens.size(), 64));  // some goldens are about long contexts
  pack(fixtures() / GetParam(), dir / "p");
  EXPECT_EQ(faults_of(dir / "p"), std::vector<std::string>{});
  for (const Precision precision : {Precision::Exact, Precision::Fast}) {
    const Loaded source(fixtures() / GetParam(), precision), packed(dir / "p", precision);
    const auto want = source.resident(tokens);
    EXPECT_EQ(packed.resident(tokens), want);
    std::int64_t top_k = 1;
    for (const model::LayerSpec& l : packed.parsed.spec.layers)
      if (const auto* moe = std::get_if<model::MoeSpec>(&l.ffn)) top_k = std::max(top_k, moe->top_k);
    const auto least = static_cast<std::size_t>(top_k);
    for (const std::size_t slots : {least, 2 * least}) {
      store::StreamingStore experts(packed.binding.experts, packed.names(), packed.streaming(slots, least));
      EXPECT_EQ(packed.logits(experts, tokens, 0, tokens.size()), want) << slots << " slots";
      EXPECT_EQ(packed.logits(experts, tokens, 5, tokens.size() / 2), want) << slots << " slots, chunks and decode";
      EXPECT_EQ(leaked_slots(experts), 0u);
    }
  }
}

// An index that is sound in itself but not that of this config.
TEST(PackFolder, TheIndexMustFitTheConfig) {
  const TempDir dir;
  pack(fixtures() / kFixture, dir / "p");
  const format::PackIndex good = format::read_pack_index(io::File::open(dir / "p/pack.index"));
  const auto refused = [&](const std::function<void(format::PackIndex&)>& change, const std::vector<std::string>& fragments) {
    format::PackIndex index = good;
    change(index);
    dir.write("p/pack.index", format::write_pack_index(index));
    expect_error([&] { inspect_model(dir / "p"); }, ErrorCode::InvalidModel, fragments);
  };
  refused([](auto& i) { i.layers[1].gate.rows *= 2; }, {"pack.index", "layer 1", "the config asks for"});
  refused([](auto& i) { i.layers[1].down.cols = INT32_MAX; }, {"layer 1", "the config asks for"});
  refused([](auto& i) { i.layers[2].biases = true; }, {"layer 2", "biases"});
  refused([](auto& i) { i.layers[0].up.format = quant::Format::f32(); }, {"layer 0", "record"});
  refused([](auto& i) { i.layers[0].up.format = quant::Format::affine(2, 64, DType::BF16); }, {"layer 0", "take"});
  refused([](auto& i) { i.layers[3].layer = 4; }, {"layer 3", "no experts"});
  refused(
      [](auto& i) {
        i.layers[3].digests.pop_back();
        i.experts_bytes -= i.layers[3].record_bytes;
      },
      {"experts.bin"});
  dir.write("p/pack.index", format::write_pack_index(good));
  EXPECT_NO_THROW(inspect_model(dir / "p"));
}

// A record is one read that is used where it lands: nothing is read beside it and a slot is no larger.
TEST_P(Pack, OneAlignedReadAnExpert) {
  const TempDir dir;
  pack(fixtures() / GetParam(), dir / "p");
  const Loaded m(dir / "p");
  std::uint64_t most = 0;
  for (const store::ExpertLayer& l : m.binding.experts.layers) {
    EXPECT_EQ(l.checks.size(), static_cast<std::size_t>(l.n_experts));
    for (std::int64_t e = 0; e < l.n_experts; ++e) {
      const auto pieces = l.expert(ExpertIdx(static_cast<std::int32_t>(e)));
      ASSERT_EQ(pieces.size(), 1u);
      EXPECT_TRUE(pieces[0].direct());
      EXPECT_EQ(pieces[0].source.offset % 4096, 0u);
      EXPECT_EQ(pieces[0].source.bytes, l.layout.bytes);
    }
    most = std::max(most, l.layout.bytes);
  }
  EXPECT_EQ(store::StreamingStore::slot_bytes(m.binding.experts), most);
}

std::string test_name(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Fixtures, Pack, testing::ValuesIn(models()), test_name);

TEST(PackFolder, TheEngineTakesItForAModel) {
  const TempDir dir;
  pack(demo_model(), dir / "p");
  const auto tokens = to_tokens(TensorFile::load(fixtures() / "demo-golden/golden.safetensors").ints("tokens"));
  EXPECT_EQ(run(dir / "p", tokens, {}).logits, run(demo_model(), tokens, {}).logits);
  const ModelInfo a = inspect_model(demo_model()), b = inspect_model(dir / "p");
  EXPECT_EQ(b.missing, a.missing);
  EXPECT_EQ(b.warnings, a.warnings);
  EXPECT_EQ(b.trunk_bytes, a.trunk_bytes);
  EXPECT_EQ(b.expert_bytes, a.expert_bytes);
  EXPECT_EQ(b.tokenizer, a.tokenizer);
  EXPECT_EQ(slurp(dir / "p/tokenizer.json"), slurp(demo_model() / "tokenizer.json"));
  EXPECT_EQ(slurp(dir / "p/chat_template.jinja"), slurp(demo_model() / "chat_template.jinja"));
  EXPECT_FALSE(fs::exists(dir / "p/pack.unfinished"));
}

// The same model gives the same bytes, wherever it goes.
TEST(PackFolder, IsReproducible) {
  const TempDir dir;
  const PackResult a = pack(fixtures() / kFixture, dir / "a"), b = pack(fixtures() / kFixture, dir / "b");
  EXPECT_EQ(a.model_id, b.model_id);
  for (const char* name : {"pack.index", "trunk.safetensors", "experts.bin", "config.json"}) EXPECT_EQ(slurp(dir / "a" / name), slurp(dir / "b" / name)) << name;
}

TEST(PackFolder, PlanSaysWhatItTakes) {
  const TempDir dir;
  PackPlan plan;
  PackOptions o;
  o.model = fixtures() / kFixture;
  o.out = dir / "p";
  o.on_plan = [&](const PackPlan& p) {
    plan = p;
    EXPECT_FALSE(fs::exists(dir / "p"));
  };
  std::uint64_t last = 0, all = 0;
  o.progress = [&](std::string_view, std::uint64_t done, std::uint64_t total) {
    EXPECT_GE(done, last);
    last = done;
    all = total;
  };
  pack_model(o);
  EXPECT_EQ(fs::file_size(dir / "p/experts.bin"), plan.expert_bytes);
  EXPECT_EQ(fs::file_size(dir / "p/trunk.safetensors"), plan.trunk_bytes);
  EXPECT_EQ(plan.n_records, 32);
  EXPECT_GT(plan.free_bytes, 0u);
  EXPECT_EQ(all, plan.total_bytes());
  EXPECT_EQ(last, all);
  std::uint64_t used = 0;
  for (const auto& entry : fs::directory_iterator(dir / "p")) used += entry.file_size();
  EXPECT_LE(used, plan.total_bytes());
}

TEST(PackFolder, WhatTheModelDoesNotReadStaysBehind) {
  const TempDir dir;
  EditedModel m("qwen3_5_moe-bf16");
  m.file.tensors["model.visual.patch_embed.weight"] = {DType::BF16, {2, 3}, std::vector<std::byte>(12)};
  fs::create_directory(dir / "m");
  dir.write("m/config.json", m.config.dump());
  m.file.save(dir / "m/model.safetensors");
  EXPECT_EQ(pack(dir / "m", dir / "p").plan.n_left_out, 1);
  EXPECT_EQ(run(dir / "p", m.tokens(), {}).logits, m.logits());
}

TEST(PackFolder, StoppedHalfWayNothingIsLeft) {
  const TempDir dir;
  PackOptions o;
  o.model = fixtures() / kFixture;
  o.out = dir / "p";
  for (int stop_at = 0; stop_at < 40; stop_at += 3) {
    int n = 0;
    o.progress = [&](std::string_view, std::uint64_t, std::uint64_t) {
      if (n++ == stop_at) throw Error(ErrorCode::Cancelled, "stop");
    };
    expect_error([&] { pack_model(o); }, ErrorCode::Cancelled, {"stop"});
    EXPECT_TRUE(fs::is_empty(dir.path())) << stop_at;
  }
}

// What a killed process leaves: refused as a model, replaced by the next attempt; a living one is left alone.
TEST(PackFolder, Leftovers) {
  const TempDir dir;
  std::vector<std::string> log;
  PackOptions o;
  o.model = fixtures() / kFixture;
  o.out = dir / "p";
  o.log = [&](LogLevel, std::string_view text) { log.emplace_back(text); };
  // Another process at work, seen from inside: our own temporary folder is locked.
  o.on_plan = [&](const PackPlan&) {
    PackOptions second = o;
    second.on_plan = {};
    expect_error([&] { pack_model(second); }, ErrorCode::InvalidArgument, {"another process"});
    for (const auto& entry : fs::directory_iterator(dir.path())) {
      if (entry.path().filename().string().starts_with(".p."))
        expect_error([&] { inspect_model(entry.path()); }, ErrorCode::InvalidModel, {"unfinished pack"});
    }
  };
  const fs::path left = dir / ".p.99-0.tmp";
  dir.write(".p.99-0.tmp/pack.unfinished", "");
  dir.write(".p.99-0.tmp/experts.bin", "123");
  expect_error([&] { inspect_model(left); }, ErrorCode::InvalidModel, {"unfinished pack"});
  expect_error([&] { faults_of(left); }, ErrorCode::InvalidArgument, {"unfinished pack"});
  pack_model(o);
  EXPECT_FALSE(fs::exists(left));
  ASSERT_EQ(log.size(), 1u);
  EXPECT_NE(log[0].find(".p.99-0.tmp"), std::string::npos) << log[0];
  EXPECT_TRUE(faults_of(dir / "p").empty());
}

TEST(PackFolder, Refusals) {
  const TempDir dir;
  pack(fixtures() / kFixture, dir / "p");
  expect_error([&] { pack(fixtures() / kFixture, dir / "p"); }, ErrorCode::InvalidArgument, {"already there"});
  expect_error([&] { pack(dir / "p", dir / "q"); }, ErrorCode::InvalidArgument, {"already a pack"});
  expect_error([&] { pack(dir / "none", dir / "q"); }, ErrorCode::InvalidArgument, {"none"});
  expect_error([&] { faults_of(fixtures() / kFixture); }, ErrorCode::InvalidArgument, {"not a pack"});
  expect_error([&] { faults_of(dir / "none"); }, ErrorCode::InvalidArgument, {"none"});
  EXPECT_FALSE(fs::exists(dir / "q"));
}

class PackDamage : public testing::Test {
 protected:
  void SetUp() override { pack(fixtures() / kFixture, path_); }
  bool refused() const {
    return is_refused([&] { Loaded(path_).resident(tokens_); });
  }
  const TempDir dir_;
  const fs::path path_ = dir_ / "p";
  const std::vector<TokenId> tokens_ = golden_tokens(kFixture);
};

TEST_F(PackDamage, EveryBitOfTheIndex) {
  const std::uint64_t bytes = fs::file_size(path_ / "pack.index");
  std::vector<std::uint64_t> bits;
  for (std::uint64_t i = 0; i < bytes * 8; i += i < 512 ? 1 : 37) bits.push_back(i);
  expect_all_seen(path_ / "pack.index", bits, [&] {
    try {
      format::ModelFolder::open(path_);
      return false;
    } catch (const Error&) {
      return true;
    }
  });
}

TEST_F(PackDamage, EveryTensorOfTheTrunk) {
  const io::File file = io::File::open(path_ / "trunk.safetensors");
  const auto header = format::read_safetensors_header(file);
  expect_all_seen(path_ / "trunk.safetensors", some_bits(0, header.tensors[0].offset, 30), [&] { return refused(); });
  for (const format::TensorInfo& t : header.tensors)
    expect_all_seen(path_ / "trunk.safetensors", {t.offset * 8, (t.offset + t.bytes) * 8 - 1}, [&] { return refused(); });
}

TEST_F(PackDamage, ConfigurationMustBeThatOfTheRecords) {
  expect_all_seen(path_ / "config.json", some_bits(0, fs::file_size(path_ / "config.json"), 60), [&] { return refused(); });
  dir_.write("p/config.json", slurp(path_ / "config.json") + " ");
  expect_error([&] { inspect_model(path_); }, ErrorCode::InvalidModel, {"config.json", "checksum"});
}

TEST_F(PackDamage, RecordsOfAResidentStore) {
  const format::PackIndex index = format::read_pack_index(io::File::open(path_ / "pack.index"));
  for (const format::PackLayer& l : index.layers)
    for (std::size_t e = 0; e < l.digests.size(); e += 3)
      expect_all_seen(path_ / "experts.bin", some_bits(l.offset + e * l.record_bytes, l.record_bytes, 4), [&] { return refused(); });
  flip(path_ / "experts.bin", (index.layers[2].offset + 5 * index.layers[2].record_bytes + 77) * 8);
  expect_error([&] { Loaded(path_).resident(tokens_); }, ErrorCode::InvalidModel, {"experts.bin", "layer 2", "expert 5", "checksum"});
}

// Everywhere in a record, padding included, while the model runs: the error names it, the other sessions go on.
TEST_F(PackDamage, RecordsOfAStreamingStore) {
  const Loaded m(path_);
  const auto want = m.resident(tokens_);
  const store::ExpertLayer& layer = m.binding.experts.layers[1];
  const format::Extent at = layer.expert(ExpertIdx(3))[0].source;
  std::vector<std::uint64_t> bits;
  for (std::uint64_t i = 0; i < at.bytes * 8; i += at.bytes * 8 / 150 + 1) bits.push_back(at.offset * 8 + i);
  bits.push_back((at.offset + at.bytes) * 8 - 1);
  store::StreamingStore experts(m.binding.experts, m.names(), m.streaming(3, 3));
  const std::vector<ExpertIdx> wanted{ExpertIdx(2), ExpertIdx(3)}, others{ExpertIdx(4), ExpertIdx(5), ExpertIdx(6)};
  for (const std::uint64_t bit : bits) {
    flip(path_ / "experts.bin", bit);
    {
      store::ExpertLease lease = experts.acquire(LayerIdx(1), wanted);
      EXPECT_NO_THROW(lease.wait(0));
      expect_error([&] { lease.wait(1); }, ErrorCode::InvalidModel, {"experts.bin", "layer 1", "expert 3", "checksum"});
    }
    flip(path_ / "experts.bin", bit);
    store::ExpertLease lease = experts.acquire(LayerIdx(1), others);  // drives out what was read
    for (std::size_t i = 0; i < others.size(); ++i) lease.wait(i);
  }
  EXPECT_EQ(leaked_slots(experts), 0u);
  EXPECT_EQ(m.logits(experts, tokens_, 0, tokens_.size()), want);
}

// A bit that the way from the disk turned: read again, and nobody notices.
TEST_F(PackDamage, OneDamagedReadIsReadAgain) {
  const Loaded m(path_);
  for (const int times : {1, -1}) {
    store::StreamingOptions o = m.streaming(8, 3);
    Fault fault;
    fault.flip_bit = 12345;
    fault.times = times;
    o.make_reader = [&](const io::MemoryRegions& regions) {
      auto reader = std::make_unique<FaultReader>(io::make_reader(m.files, regions, {}));
      reader->add(fault);
      return reader;
    };
    store::StreamingStore experts(m.binding.experts, m.names(), o);
    if (times == 1)
      EXPECT_EQ(m.logits(experts, tokens_, 0, 10), m.resident(tokens_));
    else
      expect_error([&] { m.logits(experts, tokens_, 0, 10); }, ErrorCode::InvalidModel, {"experts.bin", "layer 0", "expert", "checksum"});
    EXPECT_EQ(leaked_slots(experts), 0u);
  }
}

// Whole records, each with a checksum, in the wrong place: bound to layer and expert, so not accepted.
TEST_F(PackDamage, SwappedRecords) {
  const Loaded m(path_);
  const format::Extent a = m.binding.experts.layers[0].expert(ExpertIdx(1))[0].source, b = m.binding.experts.layers[0].expert(ExpertIdx(2))[0].source;
  std::string bytes = slurp(path_ / "experts.bin");
  std::swap_ranges(bytes.begin() + static_cast<std::ptrdiff_t>(a.offset), bytes.begin() + static_cast<std::ptrdiff_t>(a.offset + a.bytes),
                   bytes.begin() + static_cast<std::ptrdiff_t>(b.offset));
  dir_.write("p/experts.bin", bytes);
  EXPECT_EQ(faults_of(path_).size(), 2u);
  // And with their checksums swapped as well.
  format::PackIndex index = format::read_pack_index(io::File::open(path_ / "pack.index"));
  std::swap(index.layers[0].digests[1], index.layers[0].digests[2]);
  dir_.write("p/pack.index", format::write_pack_index(index));
  const auto faults = faults_of(path_);
  ASSERT_EQ(faults.size(), 2u);
  EXPECT_NE(faults[0].find("layer 0, expert 1"), std::string::npos) << faults[0];
  EXPECT_TRUE(refused());
}

TEST_F(PackDamage, ARecordOfAnotherModel) {
  const TempDir other;
  EditedModel changed(kFixture);
  changed.config["transformers_version"] = "0";  // the same weights, another model
  fs::create_directory(other / "m");
  other.write("m/config.json", changed.config.dump());
  changed.file.save(other / "m/model.safetensors");
  pack(other / "m", other / "p");
  EXPECT_EQ(slurp(other / "p/experts.bin"), slurp(path_ / "experts.bin"));
  format::PackIndex a = format::read_pack_index(io::File::open(path_ / "pack.index"));
  const format::PackIndex b = format::read_pack_index(io::File::open(other / "p/pack.index"));
  EXPECT_NE(a.model_id(), b.model_id());
  EXPECT_NE(a.layers[0].digests[0], b.layers[0].digests[0]);
  a.layers = b.layers;
  dir_.write("p/pack.index", format::write_pack_index(a));
  EXPECT_TRUE(refused());
}

TEST_F(PackDamage, FilesThatAreMissingOrCut) {
  for (const char* name : {"experts.bin", "trunk.safetensors"}) {
    const std::string good = slurp(path_ / name);
    for (const std::string& bad : {good.substr(0, good.size() - 1), good + "x", std::string()}) {
      dir_.write(std::string("p/") + name, bad);
      expect_error([&] { Loaded(path_).resident(tokens_); }, ErrorCode::InvalidModel, {name, "bytes long"});
      EXPECT_FALSE(faults_of(path_).empty());
    }
    fs::remove(path_ / name);
    expect_error([&] { Loaded(path_).resident(tokens_); }, ErrorCode::InvalidModel, {name, "missing"});
    EXPECT_EQ(faults_of(path_).size(), 1u);
    dir_.write(std::string("p/") + name, good);
  }
  EXPECT_TRUE(faults_of(path_).empty());
}

// Cut while the model runs: named, and the store goes on once the file is whole again.
TEST_F(PackDamage, CutWhileRunning) {
  const Loaded m(path_);
  const std::string good = slurp(path_ / "experts.bin");
  store::StreamingStore experts(m.binding.experts, m.names(), m.streaming(4, 3));
  fs::resize_file(path_ / "experts.bin", 100'000);
  expect_error([&] { m.logits(experts, tokens_, 0, tokens_.size()); }, ErrorCode::Io, {"experts.bin", "layer", "expert", "ends early"});
  EXPECT_EQ(leaked_slots(experts), 0u);
  dir_.write("p/experts.bin", good);
  EXPECT_EQ(m.logits(experts, tokens_, 0, tokens_.size()), m.resident(tokens_));
}

// All of them, not only the first.
TEST_F(PackDamage, VerifyNamesEachDamagedPiece) {
  const format::PackIndex index = format::read_pack_index(io::File::open(path_ / "pack.index"));
  for (const std::size_t e : {0u, 3u, 7u}) flip(path_ / "experts.bin", (index.layers[1].offset + e * index.layers[1].record_bytes + 100) * 8);
  flip(path_ / "experts.bin", fs::file_size(path_ / "experts.bin") * 8 - 1);
  const auto header = format::read_safetensors_header(io::File::open(path_ / "trunk.safetensors"));
  flip(path_ / "trunk.safetensors", header.tensors[4].offset * 8);
  flip(path_ / "config.json", 80);
  const auto faults = faults_of(path_);
  ASSERT_EQ(faults.size(), 6u);
  const std::vector<std::string> want{"config.json", header.tensors[4].name, "layer 1, expert 0", "layer 1, expert 3", "layer 1, expert 7", "layer 3, expert 7"};
  for (std::size_t i = 0; i < want.size(); ++i) EXPECT_NE(faults[i].find(want[i]), std::string::npos) << faults[i];
  flip(path_ / "pack.index", 1000);
  EXPECT_EQ(faults_of(path_).size(), 1u);
}

}  // namespace
}  // namespace moeflux::test
