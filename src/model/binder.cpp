#include "model/binder.h"

#include <algorithm>

#include "core/error.h"
#include "model/expert_binder.h"
#include "model/tensor_finder.h"

namespace moeflux::model {
namespace {

using store::MatrixSource;
using store::VectorSource;
using Transform = VectorSource::Transform;

class Binder {
 public:
  Binder(const format::ModelFolder& folder, const ModelSpec& spec, const TensorNames& names)
      : spec_(spec), names_(names), quant_(folder.config(), folder.config_origin()), finder_(folder, quant_) {
    // Other vendors' quantizations leave tensors that we would read as something else.
    const std::string& method = quant_.quant_method();
    if (!method.empty() && method != "mxfp4" && method != "fp8" && method != "compressed-tensors")
      fail(ErrorCode::Unsupported, "{}: quantization method \"{}\" is not supported", folder.config_origin(), quant_.quant_method());
  }

  Binding run() {
    Binding out;
    const std::int64_t d = spec_.hidden_dim, v = spec_.vocab_size;
    out.sources.embed = finder_.matrix(names_.prefix + names_.embed, v, d);
    if (!spec_.tied_head) out.sources.head = finder_.matrix(names_.head, v, d);
    out.sources.final_norm = norm(names_.prefix + names_.final_norm);
    for (std::size_t i = 0; i < spec_.layers.size(); ++i) {
      const auto layer = static_cast<std::int64_t>(i);
      out.sources.layers.push_back(bind_layer(layer));
      const auto* moe = std::get_if<MoeSpec>(&spec_.layers[i].ffn);
      out.experts.layers.push_back(moe == nullptr ? store::ExpertLayer{} : bind_experts(finder_, names_, layer, *moe, d));
    }
    if (spec_.tied_head) note_tied_head();
    out.missing = finder_.missing();
    if (const auto unused = finder_.unused(names_.ignored); !unused.empty() && out.missing.empty()) {
      const std::vector<std::string> first(unused.begin(), unused.begin() + static_cast<std::ptrdiff_t>(std::min<std::size_t>(unused.size(), 3)));
      out.warnings.push_back(fmt::format("{} tensor{} not used by this model: {}{}", unused.size(), unused.size() == 1 ? " is" : "s are",
                                         fmt::join(first, ", "), unused.size() > 3 ? ", .." : ""));
    }
    count_formats(out);
    return out;
  }

 private:
  std::string at(std::int64_t layer, std::string_view name) const { return names_.layer(layer, name); }

  VectorSource norm(const std::string& module) {
    return finder_.vector(module + ".weight", {{static_cast<std::uint64_t>(spec_.hidden_dim)}}, names_.norm_transform);
  }

  VectorSource vector(const std::string& name, std::int64_t n, Transform transform = Transform::None) {
    return finder_.vector(name, {{static_cast<std::uint64_t>(n)}}, transform);
  }

  LayerTensors<MatrixSource, VectorSource> bind_layer(std::int64_t l) {
    LayerTensors<MatrixSource, VectorSource> t;
    t.input_norm = norm(at(l, names_.input_norm));
    t.post_norm = norm(at(l, names_.post_norm));
    const LayerSpec& spec = spec_.layers[static_cast<std::size_t>(l)];
    std::visit([&](const auto& mixer) { t.mixer = bind_mixer(l, mixer); }, spec.mixer);
    std::visit([&](const auto& ffn) { t.ffn = bind_ffn(l, ffn); }, spec.ffn);
    return t;
  }

  GqaTensors<MatrixSource, VectorSource> bind_mixer(std::int64_t l, const GqaSpec& s) {
    const std::int64_t d = spec_.hidden_dim;
    GqaTensors<MatrixSource, VectorSource> t;
    t.q = finder_.matrix(at(l, names_.q), s.q_dim(), d);
    t.k = finder_.matrix(at(l, names_.k), s.kv_dim(), d);
    t.v = finder_.matrix(at(l, names_.v), s.kv_dim(), d);
    t.o = finder_.matrix(at(l, names_.o), d, s.n_heads * s.head_dim);
    if (s.qk_norm != QkNorm::None) {
      const bool whole = s.qk_norm == QkNorm::Whole;
      t.q_norm = vector(at(l, names_.q_norm) + ".weight", whole ? s.n_heads * s.head_dim : s.head_dim, names_.norm_transform);
      t.k_norm = vector(at(l, names_.k_norm) + ".weight", whole ? s.kv_dim() : s.head_dim, names_.norm_transform);
    }
    if (s.qkv_bias) {
      t.q_bias = vector(at(l, names_.q) + ".bias", s.q_dim());
      t.k_bias = vector(at(l, names_.k) + ".bias", s.kv_dim());
      t.v_bias = vector(at(l, names_.v) + ".bias", s.kv_dim());
    }
    if (s.o_bias) t.o_bias = vector(at(l, names_.o) + ".bias", d);
    if (s.sinks) t.sinks = vector(at(l, names_.sinks), s.n_heads);
    return t;
  }

  MlaTensors<MatrixSource, VectorSource> bind_mixer(std::int64_t l, const MlaSpec& s) {
    const std::int64_t d = spec_.hidden_dim;
    MlaTensors<MatrixSource, VectorSource> t;
    if (s.q_rank > 0) {
      t.q_a = finder_.matrix(at(l, names_.q_a), s.q_rank, d);
      t.q_norm = vector(at(l, names_.q_a_norm) + ".weight", s.q_rank);
    }
    t.q = s.q_rank > 0 ? finder_.matrix(at(l, names_.q_b), s.q_dim(), s.q_rank) : finder_.matrix(at(l, names_.q), s.q_dim(), d);
    t.kv_a = finder_.matrix(at(l, names_.kv_a), s.cache_dim(), d);
    t.kv_norm = vector(at(l, names_.kv_a_norm) + ".weight", s.kv_rank);
    t.o = finder_.matrix(at(l, names_.o), d, s.out_dim());
    if (finder_.exists(at(l, names_.embed_q) + ".weight")) {
      const std::vector<std::uint64_t> heads{static_cast<std::uint64_t>(s.n_heads)};
      t.embed_q = finder_.matrix(at(l, names_.embed_q), s.kv_rank, s.nope_dim, heads);
      t.v_b = finder_.matrix(at(l, names_.unembed_out), s.v_dim, s.kv_rank, heads);
      return t;
    }
    // One tensor holds both, per head nope_dim key rows and v_dim value rows.
    const std::int64_t per_head = s.nope_dim + s.v_dim;
    const MatrixSource both = finder_.matrix(at(l, names_.kv_b), s.n_heads * per_head, s.kv_rank);
    if (both.rows == 0) return t;
    t.k_b = rows_of_heads(both, s.n_heads, per_head, 0, s.nope_dim);
    t.v_b = rows_of_heads(both, s.n_heads, per_head, s.nope_dim, s.v_dim);
    return t;
  }

  // Rows [first, first + n) of every block of per_head rows.
  static MatrixSource rows_of_heads(MatrixSource from, std::int64_t n_heads, std::int64_t per_head, std::int64_t first, std::int64_t n) {
    add_runs(from, n_heads, per_head, first, n);
    return from;
  }

  static void add_runs(MatrixSource& m, std::int64_t n_heads, std::int64_t per_head, std::int64_t first, std::int64_t n) {
    if (m.runs.empty()) m.rows = 0;
    for (std::int64_t h = 0; h < n_heads; ++h) m.runs.push_back({h * per_head + first, n});
    m.rows += n_heads * n;
  }

  GatedDeltaTensors<MatrixSource, VectorSource> bind_mixer(std::int64_t l, const GatedDeltaSpec& s) {
    const std::int64_t d = spec_.hidden_dim;
    const auto heads = static_cast<std::uint64_t>(s.n_v_heads), width = static_cast<std::uint64_t>(s.conv_width());
    const auto taps = static_cast<std::uint64_t>(s.n_taps);
    GatedDeltaTensors<MatrixSource, VectorSource> t;
    if (names_.delta_qkvz.empty()) {
      t.qkv = finder_.matrix(at(l, names_.delta_qkv), s.conv_width(), d);
      t.z = finder_.matrix(at(l, names_.delta_z), s.value_width(), d);
      t.b = finder_.matrix(at(l, names_.delta_b), s.n_v_heads, d);
      t.a = finder_.matrix(at(l, names_.delta_a), s.n_v_heads, d);
    } else {
      bind_grouped_delta(l, s, t);
    }
    t.out = finder_.matrix(at(l, names_.delta_out), d, s.value_width());
    // Both layouts of the convolution are the same bytes.
    t.conv = finder_.vector(at(l, names_.delta_conv) + ".weight", {{width, 1, taps}, {width, taps, 1}}, Transform::None);
    t.neg_exp_a = finder_.vector(at(l, names_.delta_a_log), {{heads}}, Transform::NegExp);
    t.dt_bias = finder_.vector(at(l, names_.delta_dt_bias), {{heads}}, Transform::None);
    t.norm = finder_.vector(at(l, names_.delta_norm) + ".weight", {{static_cast<std::uint64_t>(s.v_dim)}}, Transform::None);
    return t;
  }

  // Per key head [q: dk | k: dk | v: r dv | z: r dv] and [b: r | a: r], r value heads to a key head.
  void bind_grouped_delta(std::int64_t l, const GatedDeltaSpec& s, GatedDeltaTensors<MatrixSource, VectorSource>& t) {
    const std::int64_t d = spec_.hidden_dim, heads = s.n_k_heads, r = s.n_v_heads / heads, dv = r * s.v_dim;
    const std::int64_t per_head = 2 * s.k_dim + 2 * dv;
    const MatrixSource qkvz = finder_.matrix(at(l, names_.delta_qkvz), heads * per_head, d);
    const MatrixSource ba = finder_.matrix(at(l, names_.delta_ba), heads * 2 * r, d);
    if (qkvz.rows == 0 || ba.rows == 0) return;
    t.qkv = rows_of_heads(qkvz, heads, per_head, 0, s.k_dim);
    add_runs(t.qkv, heads, per_head, s.k_dim, s.k_dim);
    add_runs(t.qkv, heads, per_head, 2 * s.k_dim, dv);
    t.z = rows_of_heads(qkvz, heads, per_head, 2 * s.k_dim + dv, dv);
    t.b = rows_of_heads(ba, heads, 2 * r, 0, r);
    t.a = rows_of_heads(ba, heads, 2 * r, r, r);
  }

  FfnTensors<MatrixSource, VectorSource> bind_gate_up_down(const std::string& module, std::int64_t inner) {
    const std::int64_t d = spec_.hidden_dim;
    return {finder_.matrix(module + "." + names_.gate, inner, d), finder_.matrix(module + "." + names_.up, inner, d),
            finder_.matrix(module + "." + names_.down, d, inner)};
  }

  FfnTensors<MatrixSource, VectorSource> bind_ffn(std::int64_t l, const DenseSpec& s) { return bind_gate_up_down(at(l, names_.dense), s.inner_dim); }

  MoeTensors<MatrixSource, VectorSource> bind_ffn(std::int64_t l, const MoeSpec& s) {
    MoeTensors<MatrixSource, VectorSource> t;
    t.router = finder_.matrix(at(l, names_.router), s.n_experts, spec_.hidden_dim);
    if (s.shared_dim > 0) t.shared = bind_gate_up_down(at(l, names_.shared), s.shared_dim);
    if (s.router.bias) t.router_bias = vector(at(l, names_.router) + ".bias", s.n_experts);
    if (s.router.select_bias) t.select_bias = vector(at(l, names_.select_bias), s.n_experts);
    if (s.shared_gate) t.shared_gate = finder_.matrix(at(l, names_.shared_gate), 1, spec_.hidden_dim);
    return t;
  }

  // A head that is stored although the config ties it is the same matrix again: not an extra tensor.
  void note_tied_head() {
    if (finder_.exists(names_.head + ".weight")) finder_.matrix(names_.head, spec_.vocab_size, spec_.hidden_dim);
  }

  static void count_formats(Binding& out) {
    struct Visitor {
      Binding& out;
      void operator()(const MatrixSource& m) const {
        if (m.rows > 0) out.trunk_formats[m.format.name()] += m.bytes();
        out.trunk_params += static_cast<std::uint64_t>(m.rows) * static_cast<std::uint64_t>(m.cols);
      }
      void operator()(const VectorSource& v) const {
        if (v.count > 0) out.trunk_formats["f32"] += v.bytes();
        out.trunk_params += static_cast<std::uint64_t>(v.count);
      }
    };
    for_each_tensor(out.sources, Visitor{out});
    for (const store::ExpertLayer& l : out.experts.layers) {
      const auto n = static_cast<std::uint64_t>(l.n_experts);
      if (n == 0) continue;
      for (const store::RecordMatrix* m : {&l.layout.gate, &l.layout.up, &l.layout.down}) out.expert_formats[m->format.name()] += n * m->bytes();
      for (const store::RecordVector* v : {&l.layout.gate_bias, &l.layout.up_bias, &l.layout.down_bias})
        if (v->count > 0) out.expert_formats["f32"] += n * v->bytes();
    }
  }

  const ModelSpec& spec_;
  const TensorNames& names_;
  format::QuantConfig quant_;
  TensorFinder finder_;
};

std::uint64_t sum(const std::map<std::string, std::uint64_t>& by_format) noexcept {
  std::uint64_t total = 0;
  for (const auto& [name, bytes] : by_format) total += bytes;
  return total;
}

}  // namespace

std::uint64_t Binding::trunk_bytes() const noexcept { return sum(trunk_formats); }
std::uint64_t Binding::expert_bytes() const noexcept { return sum(expert_formats); }

std::uint64_t Binding::largest_record() const noexcept {
  std::uint64_t largest = 0;
  for (const store::ExpertLayer& l : experts.layers) largest = std::max(largest, l.layout.bytes);
  return largest;
}

void Binding::require_complete(const format::ModelFolder& folder) const {
  if (missing.empty()) return;
  const std::size_t shown = std::min<std::size_t>(missing.size(), 5);
  const std::vector<std::string> first(missing.begin(), missing.begin() + static_cast<std::ptrdiff_t>(shown));
  fail(ErrorCode::InvalidModel, "{}: {} tensor{} missing: {}{}", folder.path().string(), missing.size(), missing.size() == 1 ? " is" : "s are",
       fmt::join(first, ", "), missing.size() > shown ? ", .." : "");
}

Binding bind(const format::ModelFolder& folder, const ModelSpec& spec, const TensorNames& names) { return Binder(folder, spec, names).run(); }

}  // namespace moeflux::model
