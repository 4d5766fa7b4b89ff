"""doctor: what this machine offers."""

import os
import subprocess

from support import BINARY, DEMO, FIXTURES, CliTest, main


class Doctor(CliTest):
    def test_machine(self):
        value = self.expect_ok("doctor", "--json").json
        self.assertEqual(value["isa"], value["isas"][0])
        self.assertEqual(value["isas"][-1], "scalar")
        self.assertEqual(value["n_cpus"], len(os.sched_getaffinity(0)))
        self.assertEqual(value["ram_bytes"] % 1024, 0)
        self.assertGreater(value["available_bytes"], 0)
        self.assertLessEqual(value["usable_bytes"], value["available_bytes"])
        self.assertEqual(value["page_bytes"], os.sysconf("SC_PAGESIZE"))
        self.assertEqual(value["kernel"], os.uname().release)
        self.assertGreater(value["memory_bytes_per_second"], 1e8)
        self.assertEqual(value["uring"], value["uring_note"] == "")
        for key in ("disk", "model"):
            self.assertIsNone(value[key])

    def test_chosen_isa_is_what_runs(self):
        isa = self.expect_ok("doctor", "--json").json["isa"]
        backend = self.expect_ok("bench", DEMO, "-p", 4, "-n", 1, "-r", 1, "--json").json["backend"]
        self.assertIn(f"cpu {isa},", backend)

    def test_table(self):
        text = self.expect_ok("doctor").out
        rows = {line.split("  ")[0].strip(): line for line in text.splitlines()}
        for name in ("cpu", "kernels", "memory", "huge pages", "bandwidth", "io_uring", "disk", "gpu"):
            self.assertIn(name, rows, text)
        self.assertIn("scalar", rows["kernels"])
        self.assertIn("give a folder", rows["disk"])
        self.assertNotIn("model", rows)

    def test_gpu_is_there_or_said_why_not(self):
        value = self.expect_ok("doctor", "--json").json
        if value["gpus"]:
            self.assertTrue(all(gpu["name"] for gpu in value["gpus"]))
        else:
            self.assertIn("CUDA", value["gpu_note"])
            self.assertRegex(self.expect_ok("doctor").out, r"gpu +none: .*CUDA")

    def check_disk(self, disk):
        self.assertIn(disk["reader"], ("uring", "pread"))
        self.assertEqual([rate["depth"] for rate in disk["rates"]], [1, 2, 4])
        for rate in disk["rates"]:
            self.assertGreater(rate["bytes_per_second"], 0)

    def test_model(self):
        value = self.expect_ok("doctor", DEMO, "--json").json
        self.check_disk(value["disk"])
        self.assertFalse(value["disk"]["temporary"])
        self.assertEqual(value["disk"]["n_files"], 1)
        self.assertEqual(value["disk"]["file_bytes"], (DEMO / "model.safetensors").stat().st_size)
        info = self.expect_ok("inspect", DEMO, "--json").json
        self.assertEqual(value["model"], {"family": info["family"], "trunk_bytes": info["trunk_bytes"],
                                          "expert_bytes": info["expert_bytes"], "fits": True})
        text = self.expect_ok("doctor", DEMO).out
        for fragment in ("at depth 1", "at depth 4", "fits into", "tok/s"):
            self.assertIn(fragment, text)

    def test_folder_without_large_files(self):
        self.write("small", "x")
        value = self.expect_ok("doctor", self.dir, "--json").json
        self.check_disk(value["disk"])
        self.assertTrue(value["disk"]["temporary"])
        self.assertEqual(os.listdir(self.dir), ["small"])
        self.assertIsNone(value["model"])

    def test_holes_are_not_read(self):
        with open(self.dir / "sparse", "wb") as file:
            file.truncate(1 << 30)
        self.assertTrue(self.expect_ok("doctor", self.dir, "--json").json["disk"]["temporary"])

    def test_disk_that_takes_no_file(self):
        """The rest is told all the same."""

        def limited():
            import resource
            import signal
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

        done = subprocess.run([BINARY, "doctor", self.dir], capture_output=True, preexec_fn=limited)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(b"not measured", done.stdout)
        self.assertIn(str(self.dir).encode(), done.stdout)
        self.assertEqual(os.listdir(self.dir), [])

    def test_model_that_is_not_supported(self):
        model = self.copy_model()
        (model / "config.json").write_text('{"model_type": "unheard_of"}')
        value = self.expect_ok("doctor", model, "--json").json
        self.assertIsNone(value["model"])
        self.assertIn("unheard_of", value["model_error"])
        self.check_disk(value["disk"])
        self.assertIn("unheard_of", self.expect_ok("doctor", model).out)

    def test_too_large_for_this_machine(self):
        self.expect_ok("synth", "--shape", "Kimi-K2", "--headers-only", "--out", self.dir / "m")
        value = self.expect_ok("doctor", self.dir / "m", "--json").json
        self.assertEqual(value["model"]["fits"], value["usable_bytes"] > 570e9)
        if not value["model"]["fits"]:
            self.assertIn("run with --ram", self.expect_ok("doctor", self.dir / "m").out)

    def test_errors(self):
        self.expect_error(["doctor", self.dir / "nowhere"], "nowhere")
        self.expect_error(["doctor", FIXTURES, "more"], "more")


if __name__ == "__main__":
    main()
