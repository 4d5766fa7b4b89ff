// The dense part of a model, resident for the engine's life: matrices in their stored format, vectors as f32.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <moeflux/types.h>

#include "core/buffer.h"
#include "core/tensor_view.h"
#include "format/model_folder.h"
#include "quant/format.h"
#include "store/bulk_load.h"

namespace moeflux::store {

// A matrix on disk. rows == 0: there is none.
struct MatrixSource {
  // Rows [begin, begin + n) of the tensor, in the order the model wants them.
  struct RowRun {
    std::int64_t begin = 0, n = 0;
  };

  std::string name;  // of the tensor, for messages
  quant::Format format;
  std::int64_t rows = 0, cols = 0;
  format::Extent data, scales, biases;
  std::vector<RowRun> runs;  // empty: all rows as they are; else they add up to `rows`
  std::int64_t rows_per_scale = 1;    // rows that share one stored row of scales; in memory each has its own
  DType scale_dtype = DType::F32;     // stored, where rows_per_scale > 1
  float bias_per_scale = 0.0f;        // not 0: biases are not stored but this multiple of the scales

  // As loaded.
  std::uint64_t bytes() const noexcept { return format.matrix_bytes(static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(cols)); }
};

// A small tensor that is kept as f32. count == 0: there is none.
struct VectorSource {
  enum class Transform : std::uint8_t { None, PlusOne, NegExp };  // w, 1 + w, -exp(w)

  std::string name;
  DType dtype = DType::F32;
  format::Extent data;
  std::int64_t count = 0;
  Transform transform = Transform::None;

  std::uint64_t bytes() const noexcept { return static_cast<std::uint64_t>(count) * 4; }
};

// Reads tensors into memory it owns; the views it returns live as long as it does. Large matrices are read all together by
// finish(): until then their memory is zero. A tensor of a pack that does not match its checksum, twice, is InvalidModel naming
// file and tensor.
class TrunkStore {
 public:
  // `folder` is used by load calls only; allocator and copier must outlive the store.
  TrunkStore(const format::ModelFolder& folder, Allocator& allocator, Copier& copier)
      : folder_(folder), allocator_(allocator), copier_(copier) {}

  // An empty view for no source. `bands`: brought into bands where it has them (the allocator's memory is the host's).
  quant::MatrixView load(const MatrixSource& source, bool bands = false);
  TensorView load(const VectorSource& source);         // [count] f32
  TensorView load(std::span<const float> values);      // computed at load, for example rope frequencies
  // Reads what load() put off. progress (may be empty) gets the bytes of all tensors that are in place.
  void finish(const std::function<void(std::uint64_t)>& progress = {});
  std::uint64_t bytes() const noexcept { return bytes_; }

 private:
  // A matrix whose bytes are still to come: codes, scales and biases behind each other.
  struct Coming {
    quant::MatrixView view;  // order Rows
    std::byte* memory = nullptr;
    bool bands = false;
    std::atomic<std::size_t> n_reads{0};  // not there yet
  };
  // Memory for all parts of a matrix.
  Coming& add(const MatrixSource& source, bool bands);
  quant::MatrixView finished(const Coming& coming);  // in bands where they are wanted
  // `runs` in units of row_bytes; empty: everything. The reading is put off.
  void load_rows(const format::Extent& extent, std::uint64_t row_bytes, const MatrixSource& source, const std::byte* to, Coming& coming);
  // A whole tensor in host memory, checked.
  std::vector<std::byte> read_whole(const format::Extent& extent, const std::string& name) const;
  // Matrices that memory holds otherwise than the file: as a whole through host memory.
  void load_changed(const MatrixSource& source, const quant::MatrixView& to);
  std::vector<std::byte> read_rows(const format::Extent& extent, std::uint64_t row_bytes, const MatrixSource& source, std::int64_t rows_per_row) const;
  void upload(const std::byte* to, std::span<const std::byte> bytes);
  std::byte* take(std::uint64_t bytes);  // memory for one tensor

  const format::ModelFolder& folder_;
  Allocator& allocator_;
  Copier& copier_;
  std::vector<Buffer> buffers_;
  std::byte* free_ = nullptr;  // the rest of the last block that tensors share
  std::uint64_t free_bytes_ = 0;
  std::vector<BulkRead> put_off_;    // id: into put_off_for_
  std::vector<std::pair<std::string, Coming*>> put_off_for_;  // the tensor's name and its matrix
  std::deque<Coming> coming_;
  std::vector<std::pair<quant::MatrixView, std::string>> to_check_;  // scales that only their values can condemn
  std::uint64_t bytes_ = 0;
};

}  // namespace moeflux::store
