#include "io/file.h"
#include "io/output_file.h"

namespace moeflux::io {

void write_file_atomically(const std::filesystem::path& path,
                           std::span<const std::span<const std::byte>> parts) {
  OutputFile file(path);
  for (const std::span<const std::byte> part : parts) file.write(part);
  file.commit();
}

}  // namespace moeflux::io
