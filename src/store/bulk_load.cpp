#include "store/bulk_load.h"

#include <algorithm>
#include <array>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/thread_pool.h"
#include "io/async_reader.h"
#include "io/region.h"

namespace moeflux::store {
namespace {

constexpr std::uint64_t kBlockBytes = 2u << 20;  // full speed on every disk we know; the reader would cut larger ones
constexpr std::uint64_t kWindowBytes = kBlockBytes + io::kDirectAlign;  // a block may begin and end inside a disk block
constexpr std::size_t kMaxWindows = 16;
constexpr int kMaxThreads = 4;  // two copy as fast as one disk reads

// A run of bytes of one file that serves the reads [first, last].
struct Block {
  std::uint32_t file = 0;
  std::uint64_t offset = 0, bytes = 0;
  std::size_t first = 0, last = 0;
};

std::vector<Block> plan_blocks(std::span<const BulkRead> reads) {
  std::vector<Block> blocks;
  for (std::size_t i = 0; i < reads.size(); ++i) {
    const format::Extent& e = reads[i].source;
    for (std::uint64_t done = 0; done < e.bytes;) {
      // What has a checksum and fits a block is not cut: it is checked while it is in the cache.
      const std::uint64_t most = reads[i].check && e.bytes <= kBlockBytes ? kBlockBytes - e.bytes : kBlockBytes - 1;
      const bool goes_on = !blocks.empty() && blocks.back().file == e.file && blocks.back().bytes <= most &&
                           blocks.back().offset + blocks.back().bytes == e.offset + done;
      if (!goes_on) blocks.push_back({e.file, e.offset + done, 0, i, i});
      Block& b = blocks.back();
      const std::uint64_t n = std::min(e.bytes - done, kBlockBytes - b.bytes);
      b.bytes += n;
      b.last = i;
      done += n;
    }
  }
  return blocks;
}

// What the threads of one load share.
class Load {
 public:
  Load(const format::ModelFolder& folder, std::span<const BulkRead> reads, Copier& copier, const BulkHooks& hooks)
      : folder_(folder), reads_(reads), copier_(copier), hooks_(hooks), blocks_(plan_blocks(reads)) {
    const std::size_t windows = std::min(kMaxWindows, blocks_.size());
    region_ = io::Region::allocate(windows * kWindowBytes, windows == kMaxWindows);
    for (std::size_t i = windows; i-- > 0;) free_.push_back(region_.data() + i * kWindowBytes);
    windows_.resize(blocks_.size());
    for (const BulkRead& r : reads) left_.push_back(r.source.bytes);
    std::vector<std::filesystem::path> paths;
    for (std::size_t f = 0; f < folder.n_files(); ++f) paths.push_back(folder.file(static_cast<std::uint32_t>(f)).path());
    io::ReaderOptions options;
    options.depth = kMaxWindows;
    options.n_threads = kMaxThreads;
    reader_ = io::make_reader(paths, {region_.span()}, options);
  }

  void run() {
    const auto n = std::min({static_cast<std::size_t>(usable_cores()), static_cast<std::size_t>(kMaxThreads), blocks_.size()});
    std::vector<std::thread> helpers;
    for (std::size_t i = 1; i < n; ++i) helpers.emplace_back([this] { work(false); });
    work(true);
    for (std::thread& t : helpers) t.join();
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void work(bool reports) noexcept {
    try {
      while (!finished()) {
        submit();
        std::array<io::ReadCompletion, 1> done;
        if (reader_->wait(done, std::chrono::milliseconds(20)) == 0) continue;
        finish(done[0]);
        if (reports && hooks_.progress) hooks_.progress(progress());
      }
      if (reports && hooks_.progress && !failed()) hooks_.progress(progress());  // what the others did last
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }

  bool failed() {
    const std::lock_guard lock(mutex_);
    return error_ != nullptr;
  }
  bool finished() {
    const std::lock_guard lock(mutex_);
    return error_ != nullptr || n_done_ == blocks_.size();
  }
  std::uint64_t progress() {
    const std::lock_guard lock(mutex_);
    return bytes_done_;
  }

  // As many blocks as there are windows for.
  void submit() {
    const std::lock_guard lock(mutex_);
    for (; next_ < blocks_.size() && !free_.empty(); ++next_) {
      const Block& b = blocks_[next_];
      windows_[next_] = free_.back();
      io::ReadRequest request;
      request.file = b.file;
      request.offset = b.offset;
      request.bytes = b.bytes;
      request.window = windows_[next_];
      request.tag = next_;
      if (reader_->submit({&request, 1}) != 0) fail(ErrorCode::Internal, "{}: a read was refused", folder_.file(b.file).path().string());
      free_.pop_back();
    }
  }

  void finish(const io::ReadCompletion& c) {
    const Block& b = blocks_[c.tag];
    std::byte* const window = windows_[c.tag];
    std::byte* bytes = window + io::aligned_window(b.offset, b.bytes).skew;
    if (c.status != 0 || c.bytes != b.bytes) {
      bytes = window;
      again(b, bytes);
    }
    for (std::size_t i = b.first; i <= b.last; ++i) {
      const Part part = part_of(reads_[i], b);
      if (part.bytes == 0) continue;
      const std::span<const std::byte> data(bytes + (part.offset - b.offset), part.bytes);
      const bool whole = part.bytes == reads_[i].source.bytes;
      const bool damaged = reads_[i].check && whole && !reads_[i].check->passes(data);
      if (damaged)
        load_again(reads_[i]);
      else
        copier_.to_device(reads_[i].to + (part.offset - reads_[i].source.offset), data.data(), data.size());
      if (!whole && !completed(i, part.bytes)) continue;
      if (reads_[i].check && !whole && !passes(reads_[i])) load_again(reads_[i]);
      if (hooks_.arrived) hooks_.arrived(reads_[i].id);
    }
    const std::lock_guard lock(mutex_);
    free_.push_back(window);
    ++n_done_;
    bytes_done_ += b.bytes;
  }

  // What a block holds of a read.
  struct Part {
    std::uint64_t offset = 0, bytes = 0;  // in the file
  };
  static Part part_of(const BulkRead& r, const Block& b) noexcept {
    const std::uint64_t from = std::max(r.source.offset, b.offset), to = std::min(r.source.offset + r.source.bytes, b.offset + b.bytes);
    return {from, from < to ? to - from : 0};
  }

  // Whether these were the last bytes that read i waited for.
  bool completed(std::size_t i, std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    return (left_[i] -= bytes) == 0;
  }

  // Of a read that is in place.
  bool passes(const BulkRead& r) {
    if (const std::byte* in_place = copier_.host_view(r.to)) return r.check->passes({in_place, r.source.bytes});
    DigestStream digest(r.check->seed);
    std::vector<std::byte> staging(std::min(kBlockBytes, r.source.bytes));
    for (std::uint64_t done = 0; done < r.source.bytes; done += staging.size()) {
      const std::size_t n = std::min<std::uint64_t>(staging.size(), r.source.bytes - done);
      copier_.to_host(staging.data(), r.to + done, n);
      digest.add({staging.data(), n});
    }
    return digest.digest() == r.check->digest;
  }

  // Damaged: once more through the page cache; then it is an error.
  void load_again(const BulkRead& r) {
    const io::File& file = folder_.file(r.source.file);
    std::vector<std::byte> staging(std::min(kBlockBytes, r.source.bytes));
    for (std::uint64_t done = 0; done < r.source.bytes; done += staging.size()) {
      const std::size_t n = std::min<std::uint64_t>(staging.size(), r.source.bytes - done);
      file.read_exact(r.source.offset + done, {staging.data(), n});
      copier_.to_device(r.to + done, staging.data(), n);
    }
    if (passes(r)) return;
    fail(ErrorCode::InvalidModel, "{}: {}what is at offset {} ({} bytes) {}", file.path().string(), hooks_.describe ? hooks_.describe(r.id) : "",
         r.source.offset, r.source.bytes, kDamaged);
  }

  // Read by read, so that the message tells whose bytes are missing.
  void again(const Block& b, std::byte* bytes) {
    for (std::size_t i = b.first; i <= b.last; ++i) {
      const Part part = part_of(reads_[i], b);
      if (part.bytes == 0) continue;
      try {
        folder_.file(b.file).read_exact(part.offset, {bytes + (part.offset - b.offset), part.bytes});
      } catch (const Error& error) {
        fail(error.code(), "{}{}", hooks_.describe ? hooks_.describe(reads_[i].id) : "", error.what());
      }
    }
  }

  const format::ModelFolder& folder_;
  std::span<const BulkRead> reads_;
  Copier& copier_;
  const BulkHooks& hooks_;
  const std::vector<Block> blocks_;
  io::Region region_;
  std::mutex mutex_;  // guards what follows
  std::vector<std::byte*> free_;
  std::vector<std::byte*> windows_;  // of each block in flight
  std::vector<std::uint64_t> left_;  // bytes each read still waits for
  std::size_t next_ = 0, n_done_ = 0;
  std::uint64_t bytes_done_ = 0;
  std::exception_ptr error_;
  std::unique_ptr<io::AsyncReader> reader_;  // last: it stops before the memory it writes to goes
};

}  // namespace

void bulk_load(const format::ModelFolder& folder, std::span<BulkRead> reads, Copier& copier, const BulkHooks& hooks) {
  std::sort(reads.begin(), reads.end(), [](const BulkRead& a, const BulkRead& b) {
    return a.source.file != b.source.file ? a.source.file < b.source.file : a.source.offset < b.source.offset;
  });
  std::uint64_t total = 0;
  for (const BulkRead& r : reads) total += r.source.bytes;
  if (total > 0) Load(folder, reads, copier, hooks).run();
}

}  // namespace moeflux::store
