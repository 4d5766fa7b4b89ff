#include <moeflux/probe.h>

#include "backend/cpu/cpu_backend.h"
#include "core/error.h"
#include "core/thread_pool.h"
#include "io/async_reader.h"
#include "io/machine.h"

namespace moeflux {
namespace {

// Tried on a file that is always there and readable: this program.
void probe_uring(MachineReport& report) {
  try {
    const io::ReaderProbe probe = io::probe_reader("/proc/self/exe");
    report.uring = probe.uring;
    if (!probe.uring) report.uring_note = probe.note;
  } catch (const Error& error) {
    report.uring_note = error.what();
  }
}

}  // namespace

MachineReport probe_machine() {
  const io::MachineInfo info = io::probe_machine();
  MachineReport report;
  report.kernel = info.kernel;
  report.cpu_name = info.cpu_name;
  report.isas = backend::supported_isas();
  report.n_cpus = static_cast<int>(info.n_allowed_cpus);
  report.cpu_quota = info.cgroup.cpu_quota;
  report.n_threads = usable_cores();
  report.ram_bytes = info.ram_total;
  report.available_bytes = info.ram_available;
  report.group_limit_bytes = info.cgroup.memory_limit;
  report.group_available_bytes = info.cgroup.memory_available;
  report.usable_bytes = info.usable_memory();
  report.page_bytes = info.page_bytes;
  report.huge_page_bytes = info.huge_page_bytes;
  report.huge_pages = info.huge_pages;
  probe_uring(report);
  return report;
}

}  // namespace moeflux
