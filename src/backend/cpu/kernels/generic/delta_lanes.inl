// The passes of generic/delta_rows.inl where registers have fewer than sixteen lanes: four rows at a time, register by register of the sixteen
// lanes, so that all sums stay in registers; sum_lanes then adds the lanes of all of them by the tree of reduce_add. What a register is,
// registers.inl says.

namespace {

inline constexpr int kDeltaRows = 4;

// What goes to sum_lanes, as its four queries and two of its keys: sums for the next token, results of this one.
struct DeltaSums {
  alignas(64) float lanes[16 / kRegLanes][4][4][kRegLanes] = {};
  // All sums: of row r the first at [4 * r], the second behind it.
  MOEFLUX_MATH void add(float* out) const noexcept { sum_lanes(lanes, 1.0f, out, 4); }
};

#define MOEFLUX_EACH4(X) X(0) X(1) X(2) X(3)

template <bool Last>
void delta_pass(float* s, std::int64_t dk, const float* k, const float* q, const float* d, const float* next_k, float next_decay, DeltaSums& kept,
                float* sums, float* y) noexcept {
  const Reg decay = reg_set1(next_decay);
  for (int lane = 0; lane < 16; lane += kRegLanes) {
#define MOEFLUX_CLEAR(r) \
  const Reg d##r = reg_set1(d[r]); \
  [[maybe_unused]] Reg m##r = reg_set1(0.0f); \
  Reg o##r = reg_set1(0.0f);
    MOEFLUX_EACH4(MOEFLUX_CLEAR)
#undef MOEFLUX_CLEAR
    for (std::int64_t i = lane; i < dk; i += 16) {
#define MOEFLUX_ROW(r)                                               \
  {                                                                  \
    float* at = s + r * dk + i;                                      \
    Reg x = reg_fma(reg_load(k + i), d##r, reg_load(at));            \
    o##r = reg_fma(reg_load(q + i), x, o##r);                        \
    if constexpr (!Last) {                                           \
      x = reg_mul(x, decay);                                         \
      m##r = reg_fma(reg_load(next_k + i), x, m##r);                 \
    }                                                                \
    reg_store(at, x);                                                \
  }
      MOEFLUX_EACH4(MOEFLUX_ROW)
#undef MOEFLUX_ROW
    }
    auto& lanes = kept.lanes[lane / kRegLanes];
#define MOEFLUX_KEEP(r) \
  reg_store(lanes[r][1], o##r); \
  if constexpr (!Last) reg_store(lanes[r][0], m##r);
    MOEFLUX_EACH4(MOEFLUX_KEEP)
#undef MOEFLUX_KEEP
  }
  float all[16];
  kept.add(all);
  for (int r = 0; r < 4; ++r) sums[r] = all[4 * r], y[r] = all[4 * r + 1];
}

#undef MOEFLUX_EACH4

void delta_begin(float* s, std::int64_t dk, const float* k, float first_decay, DeltaSums& kept, float* sums) noexcept {
  const Reg decay = reg_set1(first_decay);
  for (int r = 0; r < kDeltaRows; ++r)
    for (int lane = 0; lane < 16; lane += kRegLanes) {
      Reg m = reg_set1(0.0f);
      for (std::int64_t i = lane; i < dk; i += 16) {
        const Reg x = reg_mul(reg_load(s + r * dk + i), decay);
        m = reg_fma(reg_load(k + i), x, m);
        reg_store(s + r * dk + i, x);
      }
      reg_store(kept.lanes[lane / kRegLanes][r][0], m);
    }
  float all[16];
  kept.add(all);
  for (int r = 0; r < kDeltaRows; ++r) sums[r] = all[4 * r];
}

std::int64_t delta_one(const DeltaBlock&, std::int64_t c, std::int64_t) noexcept { return c; }

}  // namespace
