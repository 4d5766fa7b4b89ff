// Where an expert's bytes lie in a slot. Reads bring whole disk blocks, so every piece has a window of its own in the slot
// and starts somewhere inside it; the matrices are used right there, without a copy. Pieces that a file has in another
// layout than the record get room for their changed bytes behind the windows; transform() fills it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <moeflux/types.h>

#include "store/expert_record.h"

namespace moeflux::store {

class SlotLayout {
 public:
  // Throws InvalidModel for a catalog with more pieces an expert than a read tag can name.
  explicit SlotLayout(const ExpertCatalog& catalog);

  static constexpr std::size_t kMaxPieces = 256;

  std::uint64_t slot_bytes() const noexcept { return slot_bytes_; }  // a multiple of kRecordAlign, the same for all layers
  // Offset of a piece's window in the slot.
  std::uint64_t window_at(LayerIdx layer, std::size_t piece) const noexcept { return layers_[static_cast<std::size_t>(raw(layer))].windows[piece]; }
  // Whether the piece has to be read: not, when the one before it has the same source.
  static bool needs_read(std::span<const RecordPiece> pieces, std::size_t piece) noexcept {
    return piece == 0 || pieces[piece].direct() || pieces[piece - 1].direct() || pieces[piece].source != pieces[piece - 1].source;
  }
  // Changes what has to be changed of an expert whose pieces have been read. Throws as store::apply does.
  void transform(const ExpertCatalog& catalog, LayerIdx layer, ExpertIdx expert, std::byte* slot) const;
  // The bytes of piece p of the record of such an expert: pieces[p].record_bytes() of them.
  const std::byte* piece(const ExpertCatalog& catalog, LayerIdx layer, ExpertIdx expert, std::size_t p, const std::byte* slot) const noexcept;
  // The matrices of an expert whose pieces have been read into the slot at `slot`.
  ExpertView view(const ExpertCatalog& catalog, LayerIdx layer, ExpertIdx expert, const std::byte* slot) const noexcept;

 private:
  // A component (codes, scales or biases of a matrix) lies `delta` bytes into piece `piece`.
  struct Place {
    std::size_t piece = 0;
    std::uint64_t delta = 0;
  };
  struct Layer {
    std::vector<std::uint64_t> windows;
    std::vector<std::uint64_t> changed;  // where a transformed piece goes
    std::array<Place, 12> places;        // gate, up, down x codes, scales, biases; additive biases
  };

  std::vector<Layer> layers_;
  std::uint64_t slot_bytes_ = 0;
};

}  // namespace moeflux::store
