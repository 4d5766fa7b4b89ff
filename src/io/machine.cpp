#include "io/machine.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <limits>
#include <string_view>
#include <system_error>
#include <vector>

#include "core/error.h"
#include "io/file.h"

namespace moeflux::io {
namespace {

namespace fs = std::filesystem;

// The system's files say they are empty, so they are read until they end. Empty: there is no such file.
std::string read_system_file(const fs::path& path) {
  constexpr std::size_t kMax = 4 << 20;
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return {};
  std::string text;
  char buffer[4096];
  while (text.size() < kMax) {
    const ssize_t n = ::read(fd, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    text.append(buffer, static_cast<std::size_t>(n));
  }
  ::close(fd);
  return text;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(separator), text.size());
    if (end != 0) parts.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

std::optional<std::uint64_t> number(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

// The number after `key` at the start of a line.
std::optional<std::uint64_t> field(std::string_view text, std::string_view key) {
  for (const std::string_view line : split(text, '\n'))
    if (line.starts_with(key)) return number(line.substr(key.size()));
  return std::nullopt;
}

// What stands behind "key : " in the first line that has it.
std::string text_field(std::string_view text, std::string_view key) {
  for (const std::string_view line : split(text, '\n')) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with(key) && colon != line.npos) return std::string(line.substr(colon + 2));
  }
  return {};
}

std::uint64_t kilobytes(std::string_view text, std::string_view key) {
  const std::uint64_t n = field(text, key).value_or(0);
  return n > std::numeric_limits<std::uint64_t>::max() / 1024 ? 0 : n * 1024;
}

template <class T>
void take_smaller(std::optional<T>& a, T b) {
  a = a ? std::min(*a, b) : b;
}

// Where a controller is mounted, and the process's group below it.
struct Hierarchy {
  fs::path mount;
  fs::path group;
  bool v2 = false;
};

// "4:memory:/a/b" of /proc/self/cgroup; v2 has no controllers there: "0::/a/b".
std::optional<std::string> own_group(std::string_view cgroups, std::string_view controller) {
  for (const std::string_view line : split(cgroups, '\n')) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == line.npos ? line.npos : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string_view names = line.substr(first + 1, second - first - 1);
    const auto parts = split(names, ',');
    const bool found =
        controller.empty() ? names.empty() : std::find(parts.begin(), parts.end(), controller) != parts.end();
    if (found) return std::string(line.substr(second + 1));
  }
  return std::nullopt;
}

// An empty controller: the unified hierarchy.
std::optional<Hierarchy> find_hierarchy(const fs::path& root, std::string_view controller) {
  const std::string cgroups = read_system_file(root / "proc/self/cgroup");
  const std::optional<std::string> group = own_group(cgroups, controller);
  if (!group) return std::nullopt;
  const std::string mounts = read_system_file(root / "proc/self/mountinfo");
  for (const std::string_view line : split(mounts, '\n')) {
    const std::size_t dash = line.find(" - ");
    if (dash == line.npos) continue;
    const auto before = split(line.substr(0, dash), ' ');
    const auto after = split(line.substr(dash + 3), ' ');
    if (before.size() < 5 || after.size() < 3) continue;
    const auto options = split(after[2], ',');
    const bool match = controller.empty() ? after[0] == "cgroup2"
                                          : after[0] == "cgroup" && std::find(options.begin(), options.end(),
                                                                              controller) != options.end();
    if (!match) continue;
    // Inside a container the mount may show a part of the tree only, and the group may be told from outside.
    std::string_view below = *group;
    const std::string_view shown = before[3];
    if (shown != "/" && below.starts_with(shown)) below.remove_prefix(shown.size());
    while (below.starts_with('/')) below.remove_prefix(1);
    return Hierarchy{root / fs::path(before[4]).relative_path(), fs::path(below), controller.empty()};
  }
  return std::nullopt;
}

// The own group and those above it, up to the mount.
std::vector<fs::path> groups_of(const Hierarchy& hierarchy) {
  std::vector<fs::path> groups;
  for (fs::path group = hierarchy.group; !group.empty() && group != ".."; group = group.parent_path())
    groups.push_back(hierarchy.mount / group);
  groups.push_back(hierarchy.mount);
  return groups;
}

void read_memory_group(const fs::path& group, bool v2, bool own, CgroupInfo& info) {
  // v1 writes "no limit" as the largest multiple of a page.
  constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 60;
  const auto limit = number(read_system_file(group / (v2 ? "memory.max" : "memory.limit_in_bytes")));
  const std::uint64_t usage =
      number(read_system_file(group / (v2 ? "memory.current" : "memory.usage_in_bytes"))).value_or(0);
  if (own) info.memory_usage = usage;
  if (!limit || *limit >= kNoLimit) return;
  const std::string stat = read_system_file(group / "memory.stat");
  const char* const inactive = v2 ? "inactive_file " : "total_inactive_file ";
  const char* const active = v2 ? "active_file " : "total_active_file ";
  const std::uint64_t file_pages = field(stat, inactive).value_or(0) + field(stat, active).value_or(0);
  const std::uint64_t held = usage - std::min(usage, file_pages);
  take_smaller(info.memory_limit, *limit);
  take_smaller(info.memory_available, *limit - std::min(*limit, held));
}

void read_cpu_group(const fs::path& group, bool v2, CgroupInfo& info) {
  std::optional<std::uint64_t> quota, period;
  if (v2) {
    const std::string text = read_system_file(group / "cpu.max");
    const auto parts = split(text, ' ');
    if (parts.size() < 2) return;
    quota = number(parts[0]);
    period = number(parts[1]);
  } else {
    quota = number(read_system_file(group / "cpu.cfs_quota_us"));
    period = number(read_system_file(group / "cpu.cfs_period_us"));
  }
  // "max" and -1 are no numbers: no quota.
  if (quota && period && *period != 0)
    take_smaller(info.cpu_quota, static_cast<double>(*quota) / static_cast<double>(*period));
}

// A controller lives in one of the two worlds; on hybrid systems the unified tree has none of its files.
CgroupInfo read_cgroups(const fs::path& root) {
  CgroupInfo info;
  for (const char* const controller : {"", "memory"}) {
    const std::optional<Hierarchy> h = find_hierarchy(root, controller);
    if (!h) continue;
    const std::vector<fs::path> groups = groups_of(*h);
    for (std::size_t i = 0; i < groups.size(); ++i)
      read_memory_group(groups[i], h->v2, i == 0 && info.memory_usage == 0, info);
  }
  for (const char* const controller : {"", "cpu"}) {
    const std::optional<Hierarchy> h = find_hierarchy(root, controller);
    if (!h) continue;
    for (const fs::path& group : groups_of(*h)) read_cpu_group(group, h->v2, info);
  }
  return info;
}

std::uint32_t count_allowed_cpus() {
  // Machines with more CPUs than the fixed set holds need a larger one: the call says so.
  for (std::size_t n = 1024; n <= (1U << 16); n *= 2) {
    cpu_set_t* const set = CPU_ALLOC(n);
    if (set == nullptr) break;
    const int result = ::sched_getaffinity(0, CPU_ALLOC_SIZE(n), set);
    const int count = result == 0 ? CPU_COUNT_S(CPU_ALLOC_SIZE(n), set) : 0;
    CPU_FREE(set);
    if (result == 0) return static_cast<std::uint32_t>(std::max(count, 1));
    if (errno != EINVAL) break;
  }
  const long n = ::sysconf(_SC_NPROCESSORS_ONLN);
  return n > 0 ? static_cast<std::uint32_t>(n) : 1;
}

// "always [madvise] never" -> "madvise".
std::string chosen_word(std::string_view text) {
  const std::size_t begin = text.find('[');
  const std::size_t end = text.find(']');
  if (begin == text.npos || end == text.npos || end < begin) return {};
  return std::string(text.substr(begin + 1, end - begin - 1));
}

}  // namespace

std::uint64_t MachineInfo::usable_memory() const noexcept {
  return std::min(ram_available, cgroup.memory_available.value_or(ram_available));
}

std::uint64_t MachineInfo::memory_limit() const noexcept {
  return std::min(ram_total, cgroup.memory_limit.value_or(ram_total));
}

MachineInfo probe_machine(const fs::path& root) {
  MachineInfo info;
  info.cpu_name = text_field(read_system_file(root / "proc/cpuinfo"), "model name");
  const std::string release = read_system_file(root / "proc/sys/kernel/osrelease");
  info.kernel = release.substr(0, release.find('\n'));
  const std::string meminfo = read_system_file(root / "proc/meminfo");
  info.ram_total = kilobytes(meminfo, "MemTotal:");
  info.ram_available = kilobytes(meminfo, "MemAvailable:");
  const fs::path thp = root / "sys/kernel/mm/transparent_hugepage";
  info.huge_page_bytes =
      number(read_system_file(thp / "hpage_pmd_size")).value_or(kilobytes(meminfo, "Hugepagesize:"));
  info.huge_pages = chosen_word(read_system_file(thp / "enabled"));
  info.cgroup = read_cgroups(root);
  const long page = ::sysconf(_SC_PAGESIZE);
  if (page > 0) info.page_bytes = static_cast<std::uint64_t>(page);
  info.n_allowed_cpus = count_allowed_cpus();
  info.n_cores = info.n_allowed_cpus;
  if (info.cgroup.cpu_quota) {
    const double cores = std::clamp(std::round(*info.cgroup.cpu_quota), 1.0, 65536.0);
    info.n_cores = std::min(info.n_cores, static_cast<std::uint32_t>(cores));
  }
  return info;
}

ProcessMemory process_memory() {
  const std::string status = read_system_file("/proc/self/status");
  return {.resident = kilobytes(status, "VmRSS:"), .peak_resident = kilobytes(status, "VmHWM:")};
}

void drop_from_page_cache(const fs::path& path) {
  const File file = File::open(path);
  const int error = ::posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
  if (error != 0)
    fail(ErrorCode::Io, "{}: cannot drop it from the page cache: {}", path.string(),
         std::generic_category().message(error));
}

}  // namespace moeflux::io
