#include "io/machine.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <cstring>
#include <vector>

#include "io/region.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"

namespace moeflux::io {
namespace {

using test::TempDir;

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

// A system with 16 GiB, 12 of them available.
void write_meminfo(const TempDir& dir) {
  dir.write("proc/meminfo",
            "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:   12582912 kB\nHugepagesize:       "
            "2048 kB\n");
  dir.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
  dir.write("proc/cpuinfo", "processor\t: 0\nmodel\t\t: 106\nmodel name\t: Some CPU @ 2.00GHz\nflags\t: fpu\n");
  dir.write("proc/sys/kernel/osrelease", "6.1.0-test\n");
}

TEST(Machine, ThisOne) {
  const MachineInfo info = probe_machine();
  EXPECT_GT(info.ram_total, 0u);
  EXPECT_GT(info.ram_available, 0u);
  EXPECT_LE(info.usable_memory(), info.ram_available);
  EXPECT_LE(info.memory_limit(), info.ram_total);
  EXPECT_GE(info.n_allowed_cpus, 1u);
  EXPECT_GE(info.n_cores, 1u);
  EXPECT_LE(info.n_cores, info.n_allowed_cpus);
  EXPECT_GE(info.page_bytes, 4096u);
}

TEST(Machine, AffinityCounts) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  cpu_set_t one;
  CPU_ZERO(&one);
  for (int i = 0; i < CPU_SETSIZE; ++i)
    if (CPU_ISSET(i, &before)) {
      CPU_SET(i, &one);
      break;
    }
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(probe_machine().n_allowed_cpus, 1u);
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
  EXPECT_EQ(probe_machine().n_allowed_cpus, static_cast<std::uint32_t>(CPU_COUNT(&before)));
}

TEST(Machine, WithoutGroups) {
  TempDir dir;
  write_meminfo(dir);
  const MachineInfo info = probe_machine(dir.path());
  EXPECT_EQ(info.ram_total, 16 * kGiB);
  EXPECT_EQ(info.ram_available, 12 * kGiB);
  EXPECT_EQ(info.usable_memory(), 12 * kGiB);
  EXPECT_EQ(info.memory_limit(), 16 * kGiB);
  EXPECT_FALSE(info.cgroup.memory_limit.has_value());
  EXPECT_FALSE(info.cgroup.cpu_quota.has_value());
  EXPECT_EQ(info.huge_pages, "madvise");
  EXPECT_EQ(info.cpu_name, "Some CPU @ 2.00GHz");
  EXPECT_EQ(info.kernel, "6.1.0-test");
  EXPECT_EQ(info.huge_page_bytes, 2u << 20);
}

TEST(Machine, GroupsOfVersionTwo) {
  TempDir dir;
  write_meminfo(dir);
  dir.write("proc/self/cgroup", "0::/outer/inner\n");
  dir.write("proc/self/mountinfo",
            "22 1 0:20 / /sys rw - sysfs sysfs rw\n30 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 "
            "cgroup2 rw\n");
  dir.write("sys/fs/cgroup/outer/memory.max", "4294967296\n");
  dir.write("sys/fs/cgroup/outer/memory.current", "3221225472\n");
  dir.write("sys/fs/cgroup/outer/memory.stat", "anon 5\ninactive_file 1073741824\nactive_file 536870912\n");
  dir.write("sys/fs/cgroup/outer/cpu.max", "250000 100000\n");
  dir.write("sys/fs/cgroup/outer/inner/memory.max", "max\n");
  dir.write("sys/fs/cgroup/outer/inner/memory.current", "1048576\n");
  dir.write("sys/fs/cgroup/outer/inner/cpu.max", "max 100000\n");
  const MachineInfo info = probe_machine(dir.path());
  EXPECT_EQ(info.cgroup.memory_limit, 4 * kGiB);
  EXPECT_EQ(info.cgroup.memory_available, kGiB + 3 * kGiB / 2);
  EXPECT_EQ(info.cgroup.memory_usage, 1048576u);
  EXPECT_EQ(info.usable_memory(), kGiB + 3 * kGiB / 2);
  EXPECT_EQ(info.memory_limit(), 4 * kGiB);
  EXPECT_DOUBLE_EQ(info.cgroup.cpu_quota.value(), 2.5);
}

TEST(Machine, GroupsOfVersionOne) {
  TempDir dir;
  write_meminfo(dir);
  dir.write("proc/self/cgroup", "9:name=systemd:/\n5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n");
  dir.write("proc/self/mountinfo",
            "30 22 0:26 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
            "31 22 0:27 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu,cpuacct\n"
            "32 22 0:28 / /sys/fs/cgroup/unified ro - cgroup2 cgroup2 rw\n");
  dir.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "2147483648\n");
  dir.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "1073741824\n");
  dir.write("sys/fs/cgroup/memory/memory.stat",
            "cache 7\ntotal_inactive_file 536870912\ntotal_active_file 0\n");
  dir.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "40000\n");
  dir.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  const MachineInfo info = probe_machine(dir.path());
  EXPECT_EQ(info.cgroup.memory_limit, 2 * kGiB);
  EXPECT_EQ(info.cgroup.memory_available, 3 * kGiB / 2);
  EXPECT_DOUBLE_EQ(info.cgroup.cpu_quota.value(), 0.4);
  EXPECT_EQ(info.n_cores, 1u) << "less than a core is one core";
}

TEST(Machine, NoLimitInVersionOne) {
  TempDir dir;
  write_meminfo(dir);
  dir.write("proc/self/cgroup", "4:memory:/\n5:cpu:/\n");
  dir.write("proc/self/mountinfo",
            "30 22 0:26 / /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n31 22 0:27 / "
            "/sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n");
  dir.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  dir.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  dir.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  const MachineInfo info = probe_machine(dir.path());
  EXPECT_FALSE(info.cgroup.memory_limit.has_value());
  EXPECT_FALSE(info.cgroup.cpu_quota.has_value());
  EXPECT_EQ(info.usable_memory(), 12 * kGiB);
}

TEST(Machine, OddFilesAreNoInformation) {
  TempDir dir;
  dir.write("proc/meminfo", "MemTotal: lots\nMemAvailable:\n");
  dir.write("proc/cpuinfo", "model name\nmodel name:\n");
  dir.write("proc/self/cgroup", "no colons\n:\n::\n1:memory\n");
  dir.write("proc/self/mountinfo", "a b - c\n - \n1 2 3 4\n");
  const MachineInfo info = probe_machine(dir.path());
  EXPECT_EQ(info.ram_total, 0u);
  EXPECT_EQ(info.cpu_name + info.kernel, "");
  EXPECT_FALSE(info.cgroup.memory_limit.has_value());
}

TEST(ProcessMemory, SeesWhatIsTouched) {
  const ProcessMemory before = process_memory();
  ASSERT_GT(before.resident, 0u);
  constexpr std::size_t kBytes = 64 << 20;
  {
    const Region region = Region::allocate(kBytes);
    std::memset(region.data(), 1, kBytes);
    const ProcessMemory now = process_memory();
    EXPECT_GE(now.resident, before.resident + kBytes * 9 / 10);
    EXPECT_GE(now.peak_resident, now.resident * 9 / 10);
  }
  EXPECT_LT(process_memory().resident, before.resident + kBytes / 2);
}

TEST(DiskProbe, ReadsAllKindsOfFiles) {
  TempDir dir;
  const std::vector<std::filesystem::path> files = {dir.write("a", std::string(3 << 20, 'x')),
                                                    dir.write("b", "tiny"), dir.write("c", "")};
  for (const ReaderKind kind : {ReaderKind::Auto, ReaderKind::Pread}) {
    const DiskProbe probe =
        probe_disk(files, {.reader = kind, .depth = 3, .request_bytes = 65536, .seconds = 0.02});
    EXPECT_GT(probe.bytes, 0u);
    EXPECT_GE(probe.seconds, 0.02);
    EXPECT_GT(probe.bytes_per_second(), 0);
  }
  const std::vector<std::filesystem::path> empty = {files[2]};
  test::expect_error([&] { probe_disk(empty, {}); }, ErrorCode::InvalidArgument, {"nothing to read"});
  const std::vector<std::filesystem::path> missing = {dir / "none"};
  test::expect_error([&] { probe_disk(missing, {}); }, ErrorCode::Io, {"none"});
  EXPECT_NO_THROW(drop_from_page_cache(files[0]));
}

}  // namespace
}  // namespace moeflux::io
