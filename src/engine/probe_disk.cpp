#include <moeflux/probe.h>

#include "io/folder_probe.h"

namespace moeflux {

DiskReport probe_disk(const std::filesystem::path& path, const ProgressSink& progress) {
  const io::FolderProbeOptions options;
  const io::FolderProbe probe = io::probe_folder(path, options, progress);
  DiskReport report;
  report.path = path;
  report.reader = io::reader_kind_name(probe.reader.uring ? io::ReaderKind::Uring : io::ReaderKind::Pread);
  report.direct = probe.reader.direct;
  report.note = probe.reader.note;
  report.read_size = options.request_bytes;
  report.n_files = probe.n_files;
  report.file_bytes = probe.file_bytes;
  report.temporary = probe.temporary;
  for (std::size_t i = 0; i < probe.rates.size(); ++i)
    report.rates.push_back({static_cast<int>(options.depths[i]), probe.rates[i].bytes_per_second()});
  return report;
}

}  // namespace moeflux
