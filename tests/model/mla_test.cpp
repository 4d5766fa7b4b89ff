// Latent attention: the absorbed form that runs against the plain form, in which every head has keys and
// values of its own.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "model/blocks/blocks.h"
#include "model/family.h"
#include "model/model.h"
#include "quant/decode.h"
#include "store/resident_store.h"
#include "support/evaluate.h"
#include "support/tensor_file.h"

namespace moeflux::model {
namespace {

using Row = std::vector<double>;

std::vector<std::string> latent_fixtures() {
  std::vector<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator(test::fixtures())) {
    if (!std::filesystem::exists(entry.path() / "config.json")) continue;
    const ParsedModel parsed = parse_model(format::ModelFolder::open(entry.path()));
    if (std::holds_alternative<MlaSpec>(parsed.spec.layers[0].mixer))
      out.push_back(entry.path().filename().string());
  }
  return out;
}

std::size_t n_layers(const std::string& fixture) {
  return parse_model(format::ModelFolder::open(test::fixtures() / fixture)).spec.layers.size();
}

std::vector<Row> rows_of(const quant::MatrixView& m) {
  std::vector<Row> out;
  std::vector<float> row(static_cast<std::size_t>(m.cols));
  for (std::int64_t r = 0; r < m.rows; ++r) {
    quant::decode_row(m, r, row);
    out.emplace_back(row.begin(), row.end());
  }
  return out;
}

Row multiply(const std::vector<Row>& m, const Row& x) {
  Row y;
  for (const Row& row : m) {
    double sum = 0.0;
    for (std::size_t i = 0; i < x.size(); ++i) sum += row[i] * x[i];
    y.push_back(sum);
  }
  return y;
}

Row normed(Row x, const TensorView& weight, float eps) {
  double squares = 0.0;
  for (const double v : x) squares += v * v;
  const double scale = 1.0 / std::sqrt(squares / static_cast<double>(x.size()) + static_cast<double>(eps));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] *= scale * static_cast<double>(weight.f32()[i]);
  return x;
}

// Rotates x[at ..] in place; the angle is an f32 product by definition.
void rotate(Row& x, std::size_t at, const RopeSpec& rope, std::size_t position) {
  const std::size_t n = rope.inv_freq.size();
  for (std::size_t i = 0; i < n; ++i) {
    const auto angle = static_cast<double>(static_cast<float>(position) * rope.inv_freq[i]);
    const double c = std::cos(angle) * static_cast<double>(rope.magnitude),
                 s = std::sin(angle) * static_cast<double>(rope.magnitude);
    const bool half = rope.style == backend::RopeStyle::HalfSplit;
    double& a = x[at + (half ? i : 2 * i)];
    double& b = x[at + (half ? i + n : 2 * i + 1)];
    const double first = a * c - b * s;
    b = b * c + a * s;
    a = first;
  }
}

// The plain form of one layer, in f64.
class PlainMla {
 public:
  PlainMla(const MlaSpec& spec, const MlaWeights& w)
      : s_(spec),
        w_(w),
        n_heads_(static_cast<std::size_t>(spec.n_heads)),
        nope_(static_cast<std::size_t>(spec.nope_dim)),
        rope_(static_cast<std::size_t>(spec.rope_dim)),
        v_dim_(static_cast<std::size_t>(spec.v_dim)) {
    if (!w.q_a.empty()) q_a_ = rows_of(w.q_a);
    q_ = rows_of(w.q), kv_a_ = rows_of(w.kv_a), v_b_ = rows_of(w.v_b), o_ = rows_of(w.o);
    if (!w.k_b.empty()) {
      k_b_ = rows_of(w.k_b);
      return;
    }
    // embed_q has a head's key matrix transposed.
    const std::vector<Row> transposed = rows_of(w.embed_q);
    const auto rank = static_cast<std::size_t>(spec.kv_rank);
    k_b_.assign(n_heads_ * nope_, Row(rank));
    for (std::size_t r = 0; r < k_b_.size(); ++r)
      for (std::size_t j = 0; j < rank; ++j) k_b_[r][j] = transposed[r / nope_ * rank + j][r % nope_];
  }

  std::vector<float> run(const std::vector<Row>& x) {
    const auto rank = static_cast<std::size_t>(s_.kv_rank);
    std::vector<float> out;
    for (std::size_t p = 0; p < x.size(); ++p) {
      Row q = q_a_.empty() ? multiply(q_, x[p])
                           : multiply(q_, normed(multiply(q_a_, x[p]), w_.q_norm, s_.latent_eps));
      for (std::size_t h = 0; h < n_heads_; ++h) rotate(q, h * (nope_ + rope_) + nope_, s_.rope, p);
      Row kv = multiply(kv_a_, x[p]);
      rotate(kv, rank, s_.rope, p);
      rotated_.emplace_back(kv.end() - static_cast<std::ptrdiff_t>(rope_), kv.end());
      kv.resize(rank);
      const Row latent = normed(kv, w_.kv_norm, s_.latent_eps);
      keys_.push_back(multiply(k_b_, latent));
      values_.push_back(multiply(v_b_, latent));
      Row mixed;
      for (std::size_t h = 0; h < n_heads_; ++h) {
        const Row head = attend(q, h);
        mixed.insert(mixed.end(), head.begin(), head.end());
      }
      for (const double y : multiply(o_, mixed)) out.push_back(static_cast<float>(y));
    }
    return out;
  }

 private:
  // One head of the last position over all positions so far.
  Row attend(const Row& q, std::size_t h) const {
    const std::size_t at = h * (nope_ + rope_);
    Row weights, out(v_dim_);
    double top = -HUGE_VAL, sum = 0.0;
    for (std::size_t j = 0; j < keys_.size(); ++j) {
      double score = 0.0;
      for (std::size_t i = 0; i < nope_; ++i) score += q[at + i] * keys_[j][h * nope_ + i];
      for (std::size_t i = 0; i < rope_; ++i) score += q[at + nope_ + i] * rotated_[j][i];
      weights.push_back(score * static_cast<double>(s_.scale));
      top = std::max(top, weights.back());
    }
    for (double& weight : weights) sum += weight = std::exp(weight - top);
    for (std::size_t j = 0; j < keys_.size(); ++j)
      for (std::size_t i = 0; i < v_dim_; ++i) out[i] += weights[j] / sum * values_[j][h * v_dim_ + i];
    return out;
  }

  const MlaSpec& s_;
  const MlaWeights& w_;
  std::size_t n_heads_, nope_, rope_, v_dim_;
  std::vector<Row> q_a_, q_, kv_a_, k_b_, v_b_, o_;
  std::vector<Row> keys_, rotated_, values_;  // per position: [n_heads * nope], [rope], [n_heads * v_dim]
};

// One layer of a fixture on the CPU backend.
class Layer {
 public:
  Layer(const std::string& fixture, std::size_t index)
      : folder_(format::ModelFolder::open(test::fixtures() / fixture)),
        parsed_(parse_model(folder_)),
        binding_(bind(folder_, parsed_.spec, parsed_.names)),
        backend_(backend::make_cpu_backend({.n_threads = 2, .isa = ""})),
        trunk_(folder_, backend_->allocator(), backend_->copier()),
        experts_(binding_.experts, folder_, backend_->allocator(), backend_->copier(), {}),
        spec_(std::get<MlaSpec>(parsed_.spec.layers[index].mixer)) {
    weights_ =
        std::get<MlaTensors<store::MatrixSource, store::VectorSource>>(binding_.sources.layers[index].mixer)
            .map([&](const auto& source) { return trunk_.load(source); });
    trunk_.finish();
    rope_ = {trunk_.load(std::span<const float>(spec_.rope.inv_freq)), spec_.rope.style,
             spec_.rope.magnitude};
  }

  std::int64_t hidden_dim() const { return parsed_.spec.hidden_dim; }
  const MlaSpec& spec() const { return spec_; }
  const MlaWeights& weights() const { return weights_; }

  // x [n, D] in steps of `step` tokens.
  std::vector<float> run(const std::vector<float>& x, std::int64_t step) {
    const std::int64_t d = hidden_dim(), n = static_cast<std::int64_t>(x.size()) / d;
    std::vector<float> cache(static_cast<std::size_t>(n * spec_.cache_dim())), out;
    LayerState state;
    state.k = view_f32(cache.data(), {n, 1, spec_.cache_dim()});
    state.v = state.k;
    state.v.dims[2] = spec_.kv_rank;
    Arena arena(backend_->allocator().allocate(activation_bytes(parsed_.spec, n), 64));
    const auto stream = backend_->create_stream();
    MoeScratch moe;
    ExpertCounters counters;
    Context c{*backend_, *stream, experts_, arena, moe, counters, Precision::Exact};
    for (std::int64_t at = 0; at < n; at += step) {
      const std::int64_t now = std::min(step, n - at);
      const TensorView y =
          attention_mla(c, spec_, weights_, rope_, state, view_f32(x.data() + at * d, {now, d}), at);
      out.insert(out.end(), y.f32(), y.f32() + y.count());
      arena.release(0);
    }
    return out;
  }

 private:
  format::ModelFolder folder_;
  ParsedModel parsed_;
  Binding binding_;
  std::unique_ptr<backend::Backend> backend_;
  store::TrunkStore trunk_;
  store::ResidentStore experts_;
  MlaSpec spec_;
  MlaWeights weights_;
  RopeWeights rope_;
};

void expect_plain(const std::string& fixture, std::size_t index) {
  SCOPED_TRACE(fixture + ", layer " + std::to_string(index));
  Layer layer(fixture, index);
  // More positions than one tile of keys, and inputs of the size that a norm gives.
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(70 * layer.hidden_dim()));
  for (float& v : x) v = normal(random);
  std::vector<Row> rows;
  for (auto at = x.begin(); at != x.end(); at += layer.hidden_dim())
    rows.emplace_back(at, at + layer.hidden_dim());

  const std::vector<float> absorbed = layer.run(x, 70);
  EXPECT_LE(test::relative_difference(absorbed, PlainMla(layer.spec(), layer.weights()).run(rows)), 1e-4);
  EXPECT_EQ(layer.run(x, 1), absorbed) << "token by token";
  EXPECT_EQ(layer.run(x, 7), absorbed) << "in chunks";
}

TEST(Mla, AbsorbedEqualsPlainInEveryFixture) {
  const std::vector<std::string> fixtures = latent_fixtures();
  EXPECT_GE(fixtures.size(), 8u);
  for (const std::string& fixture : fixtures)
    for (std::size_t l = 0; l < n_layers(fixture); ++l) expect_plain(fixture, l);
}

}  // namespace
}  // namespace moeflux::model
