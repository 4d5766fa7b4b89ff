"""plan: memory, hit rate and bounds before anything is loaded; bench and run under a ceiling."""

import json
import os
import pathlib
import subprocess

from support import BINARY, DEMO, CliTest, Result, main, moeflux


def control_group():
    """A fresh group with a memory controller below our own, or None."""
    try:
        lines = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = "/sys/fs/cgroup/memory" if controllers == "memory" else "/sys/fs/cgroup" if controllers == "" else None
        if root is None:
            continue
        group = pathlib.Path(root + path) / f"moeflux-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / "memory.max").exists() or (group / "memory.limit_in_bytes").exists():
            return group
        group.rmdir()
    return None


def limit(group, size):
    name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
    (group / name).write_text(str(size))


def moeflux_in(group, *args):
    command = f'echo $$ > "{group}/cgroup.procs" && exec "$@"'
    done = subprocess.run(["/bin/sh", "-c", command, "sh", BINARY, *map(str, args)], capture_output=True, timeout=120)
    return Result(done.returncode, done.stdout, done.stderr)


class Plan(CliTest):
    def plan(self, *more):
        return self.expect_ok("plan", DEMO, "--json", *more).json

    def least(self):
        return self.plan("--ctx-size", 64)["memory"]["least_bytes"]

    def test_everything_fits(self):
        value = self.plan()
        memory = value["memory"]
        info = self.expect_ok("inspect", DEMO, "--json").json
        self.assertTrue(value["fits"] and memory["all_in_memory"])
        self.assertEqual(memory["trunk_bytes"], info["trunk_bytes"])
        self.assertEqual(memory["experts"], info["n_experts"] * info["n_moe_layers"])
        self.assertEqual(memory["experts_in_memory"], memory["experts"])
        self.assertEqual(value["hit_rate"], 1)
        self.assertEqual(value["decode"]["disk_bytes_per_token"], 0)
        self.assertEqual(value["decode"]["limit"], "memory")
        self.assertGreater(value["decode"]["tokens_per_second"], 0)
        self.assertGreater(value["prefill"]["tokens_per_second"], 0)
        for key in ("memory_bytes_per_second", "disk_bytes_per_second", "operations_per_second"):
            self.assertGreater(value["machine"][key], 0)

    def test_a_ceiling_is_divided(self):
        ram = self.least() + 4_000_000
        value = self.plan("--ram", ram, "--ctx-size", 64)
        memory = value["memory"]
        self.assertFalse(memory["all_in_memory"])
        parts = ("trunk_bytes", "kv_bytes", "state_bytes", "activation_bytes", "other_bytes", "expert_bytes")
        self.assertLessEqual(sum(memory[key] for key in parts), ram)
        self.assertEqual(memory["expert_bytes"], memory["experts_in_memory"] * memory["slot_bytes"])
        self.assertAlmostEqual(value["hit_rate"], memory["experts_in_memory"] / memory["experts"])
        self.assertIn("assumed", value["hit_rate_source"])
        self.assertGreater(value["decode"]["disk_bytes_per_token"], 0)
        self.assertGreaterEqual(value["decode"]["tokens_per_second_ahead"], value["decode"]["tokens_per_second"])

    def test_a_device_that_is_not_here(self):
        ample = self.plan("--vram", "8GB", "--ctx-size", 64)
        if ample["device"]["name"]:
            self.skipTest("there is a device here")
        self.assertTrue(ample["fits"] and ample["memory"]["all_in_memory"])
        self.assertEqual(ample["device"]["hit_rate"], 1)
        self.assertEqual(ample["decode"]["link_bytes_per_token"], 0)
        least = moeflux("plan", DEMO, "--json", "--vram", "1MB", "--ctx-size", 64).json
        self.assertFalse(least["fits"])
        self.assertNotIn("decode", least)
        tight = least["device"]["least_bytes"]
        one = self.plan("--vram", tight, "--ctx-size", 64)
        self.assertTrue(one["fits"])
        self.assertEqual(one["device"]["slots"], one["device"]["spare_slots"])
        self.assertEqual(one["device"]["hit_rate"], 0)
        self.assertEqual(one["hit_rate"], 1)  # main memory has the others
        self.assertGreater(one["decode"]["link_bytes_per_token"], 0)
        self.assertEqual(one["decode"]["disk_bytes_per_token"], 0)
        self.assertNotIn("machine", one)
        half = self.plan("--vram", tight + one["memory"]["slot_bytes"] * one["memory"]["experts"] // 2, "--ctx-size", 64)
        self.assertGreater(half["device"]["hit_rate"], 0.3)
        self.assertLess(half["decode"]["link_bytes_per_token"], one["decode"]["link_bytes_per_token"])
        # What a process takes varies, by half a megabyte under AddressSanitizer: 100 of 256 slots (2.9 MB) above one of them.
        disk = self.plan("--vram", tight, "--ctx-size", 64, "--ram", one["memory"]["least_bytes"] + 100 * one["memory"]["slot_bytes"])
        self.assertGreater(disk["decode"]["disk_bytes_per_token"], 0)
        self.assertLess(disk["hit_rate"], 1)
        # Chunks get smaller before a ceiling is refused.
        self.assertTrue(self.plan("--vram", self.least_device() + 1_000_000)["fits"])
        result = moeflux("plan", DEMO, "--vram", "1MB")
        self.assertEqual(result.code, 2)
        self.assertIn("of device memory are needed", result.out)
        self.expect_ok("plan", DEMO, "--backend", "cpu", "--vram", "1MB")

    def least_device(self):
        return moeflux("plan", DEMO, "--json", "--vram", "1MB").json["device"]["least_bytes"]

    def test_too_low(self):
        result = moeflux("plan", DEMO, "--ram", "1MB")
        self.assertEqual(result.code, 2)
        self.assertIn("at least", result.out)
        value = moeflux("plan", DEMO, "--ram", "1MB", "--json").json
        self.assertFalse(value["fits"])
        self.assertNotIn("decode", value)

    def test_a_trace_gives_the_hit_rate(self):
        trace = self.dir / "routing.jsonl"
        self.expect_ok("run", DEMO, "HAMLET", "-n", 20, "--temp", 0, "--trace", trace)
        lines = trace.read_text().splitlines()
        self.assertIn("n_experts", json.loads(lines[0]))
        ram = self.least() + 4_000_000
        value = self.plan("--ram", ram, "--ctx-size", 64, "--trace", trace)
        share = value["memory"]["experts_in_memory"] / value["memory"]["experts"]
        rows = self.expect_ok("simulate", trace, "--cache", share, "--json").json["rows"]
        self.assertAlmostEqual(value["hit_rate"], rows[0]["ours"], places=6)
        self.assertIn("routing.jsonl", value["hit_rate_source"])
        self.expect_error(["plan", DEMO, "--ram", ram, "--ctx-size", 64, "--trace", self.dir / "none"], "none")

    def ceiling(self, slots):
        """A ceiling under which bench() holds about so many experts. What a process takes varies a little, so it is tried."""
        memory = self.plan("--ctx-size", 48)["memory"]
        ram = memory["least_bytes"]
        for _ in range(12):
            tried = moeflux("bench", DEMO, "-p", 24, "-n", 24, "-r", 1, "-t", 1, "--json", "--no-probe", "--ram", ram)
            if tried.code != 0:
                self.assertIn("at least", tried.err)
                ram += 1_000_000
                continue
            held = tried.json["experts_in_memory"]
            if abs(held - slots) <= 8:
                return ram
            ram += (slots - held) * memory["slot_bytes"] if held < memory["experts"] else -1_000_000
        self.skipTest("the memory of this process varies too much")

    def bench(self, *more):
        return self.expect_ok("bench", DEMO, "-p", 24, "-n", 24, "-r", 1, "-t", 1, "--json", *more).json

    def test_the_ceiling_holds_and_changes_nothing(self):
        free = self.bench("--no-probe")
        ram = self.ceiling(40)
        if free["peak_rss_bytes"] > 400e6:
            self.skipTest("this build uses much memory itself")
        for more in (["--prefetch", "on"], ["--prefetch", "off", "--io", "pread"], ["--chunk", 5]):
            value = self.bench("--ram", ram, "--no-probe", *more)
            self.assertEqual(value["logits_hash"], free["logits_hash"], more)
            self.assertLess(value["experts_in_memory"], value["experts"])
            self.assertLessEqual(value["peak_rss_bytes"], ram, more)
            self.assertGreater(value["decode"]["bytes_read_per_token"], 0)

    def test_in_a_control_group_of_the_ceilings_size(self):
        group = control_group()
        if group is None:
            self.skipTest("no control group can be made here")
        free = self.bench("--no-probe")
        if free["peak_rss_bytes"] > 400e6:
            group.rmdir()
            self.skipTest("this build uses much memory itself")
        ram = self.ceiling(40)
        try:
            limit(group, ram + (64 << 20))
            done = moeflux_in(group, "bench", DEMO, "-p", 24, "-n", 24, "-r", 1, "-t", 1, "--json", "--ram", ram, "--no-probe")
            self.assertEqual(done.code, 0, done.err)
            self.assertEqual(done.json["logits_hash"], free["logits_hash"])
            self.assertLess(done.json["experts_in_memory"], done.json["experts"])
            # Without a ceiling of its own the process keeps to the group's.
            planned = moeflux_in(group, "plan", DEMO, "--json").json
            self.assertLess(planned["memory"]["ram_bytes"], ram + (64 << 20))
        finally:
            group.rmdir()

    def test_bytes_only(self):
        ram = self.ceiling(40)
        value = self.bench("--ram", ram, "--prefetch", "off")
        bound = value["bytes_only"]
        for key in ("dependent_runs", "ahead_runs"):
            self.assertEqual(len(bound[key]), 3)
            self.assertGreater(min(bound[key]), 0)
        # One repetition, nothing read ahead: the probe moves what decoding read.
        self.assertAlmostEqual(bound["disk_bytes_per_token"] / value["decode"]["bytes_read_per_token"], 1, places=3)
        self.assertNotIn("bytes_only", self.bench())

    def test_replay(self):
        trace = self.dir / "routing.jsonl"
        first = self.bench("--no-probe", "--trace", trace)
        self.assertEqual(self.bench("--no-probe", "--replay", trace, "--warm")["n_decode"], 24)
        text = trace.read_text().splitlines()
        trace.write_text("\n".join([text[0], text[5]]) + "\n")
        # Room for more than the 32 experts of a token, and the same ones for every token: after the first all are in memory.
        ram = self.ceiling(50)
        value = self.bench("--no-probe", "--replay", trace, "--ram", ram, "--prefetch", "off")
        self.assertLess(value["experts_in_memory"], value["experts"])
        self.assertGreater(value["decode"]["hit_rate"], 0.9)
        self.assertNotEqual(value["logits_hash"], first["logits_hash"])
        self.expect_error(["bench", DEMO, "--replay", self.dir / "none"], "none")


if __name__ == "__main__":
    main()
