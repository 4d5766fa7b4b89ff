"""moeflux pack and verify: a model in one folder, whole or not at all."""

import os
import resource
import signal
import subprocess
import time

from support import BINARY, DEMO, FIXTURES, CliTest, main, moeflux, start

MODEL = FIXTURES / "qwen3_5_moe-mlx4"


def flip(path, offset, bit=0):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


class PackTest(CliTest):
    def entries(self):
        return sorted(path.name for path in self.dir.iterdir())

    def pack(self, model=MODEL, out="p"):
        return self.expect_ok("pack", model, "--out", self.dir / out)

    def test_every_verb_takes_a_pack(self):
        done = self.pack(DEMO)
        self.assertIn("256 experts", done.out)
        self.assertIn("needs", done.err)
        self.assertIn("free", done.err)
        pack = self.dir / "p"
        for arguments in (["run", "HAMLET To be", "-n", 20, "--seed", 3, "--temp", 0.7],
                          ["tokenize", "To be, or not"],
                          ["logits", "--tokens", "5,6,7,8", "--out", self.dir / "l.safetensors"],
                          ["bench", "-p", 8, "-n", 4, "-r", 1]):
            verb, *rest = arguments
            outputs = []
            for model in (DEMO, pack):
                result = self.expect_ok(verb, model, *rest)
                outputs.append((self.dir / "l.safetensors").read_bytes() if verb == "logits" else result.out)
            if verb != "bench":
                self.assertEqual(outputs[0], outputs[1], verb)
        a, b = (self.expect_ok("inspect", m, "--json").json for m in (DEMO, pack))
        for key in a:
            if key not in ("path", "model"):
                self.assertEqual(a[key], b[key], key)

    def test_json(self):
        packed = self.expect_ok("pack", MODEL, "-o", self.dir / "p", "--json").json
        self.assertEqual(packed["n_records"], 32)
        self.assertEqual(packed["expert_bytes"], (self.dir / "p" / "experts.bin").stat().st_size)
        verified = self.expect_ok("verify", self.dir / "p", "--json").json
        self.assertEqual((verified["intact"], verified["n_records"], verified["faults"]), (True, 32, []))
        self.assertGreater(verified["bytes"], packed["expert_bytes"])

    def test_verify_names_all_damage(self):
        self.pack()
        self.assertIn("intact", self.expect_ok("verify", self.dir / "p").out)
        experts = self.dir / "p" / "experts.bin"
        size = experts.stat().st_size // 32
        for index in (0, 9, 31):
            flip(experts, index * size + 50)
        result = moeflux("verify", self.dir / "p")
        self.assertEqual(result.code, 1, result.err)
        for fragment in ("layer 0, expert 0", "layer 1, expert 1", "layer 3, expert 7", "DAMAGED in 3 places"):
            self.assertIn(fragment, result.out)
        broken = moeflux("verify", self.dir / "p", "--json")
        self.assertEqual((broken.code, broken.json["intact"], len(broken.json["faults"])), (1, False, 3))
        self.expect_error(["logits", self.dir / "p", "--tokens", "1,2", "--out", self.dir / "l"], "experts.bin", "layer 0", "expert 0", "checksum")

    def test_refuses(self):
        self.pack()
        self.expect_error(["pack", MODEL, "--out", self.dir / "p"], "already there")
        self.expect_error(["pack", self.dir / "p", "--out", self.dir / "q"], "already a pack")
        self.expect_error(["pack", self.dir / "none", "--out", self.dir / "q"], "none")
        self.expect_error(["pack", MODEL, "--out", self.dir / "no" / "parent"], "parent")
        self.expect_error(["pack", MODEL], "--out")
        self.expect_error(["verify", MODEL], "not a pack")
        self.expect_error(["verify", self.dir / "none"], "none")
        self.assertEqual(self.entries(), ["p"])

    def test_no_room(self):
        """Headers alone make a model of any size: told before anything large is written."""
        self.expect_ok("synth", "--shape", "Kimi-K2", "--headers-only", "--out", self.dir / "m")
        limit = os.statvfs(self.dir)
        if limit.f_bavail * limit.f_frsize > 500e9:
            self.skipTest("this disk could hold it")
        self.expect_error(["pack", self.dir / "m", "--out", self.dir / "p"], "not enough room", "needs", code=1)
        self.assertEqual(self.entries(), ["m"])

    def test_failing_write_leaves_nothing(self):
        def limited():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))

        done = subprocess.run([BINARY, "pack", str(DEMO), "--out", str(self.dir / "p")], capture_output=True, preexec_fn=limited)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(b"trunk.safetensors", done.stderr)
        self.assertEqual(self.entries(), [])

    def interrupt(self, sig):
        """A model too large to finish (its data are holes), stopped while the records are written."""
        if not (self.dir / "m").exists():
            self.expect_ok("synth", "--shape", "35b-a3b", "--layers", 4, "--headers-only", "--out", self.dir / "m")
        process = start("pack", self.dir / "m", "--out", self.dir / "p")
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stderr.close)
        deadline = time.monotonic() + 60
        while not list(self.dir.glob(".p.*/experts.bin")):
            self.assertIsNone(process.poll(), "ended before it could be stopped")
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.002)
        process.send_signal(sig)
        return process.wait(60)

    def test_interrupt_leaves_nothing(self):
        for sig in (signal.SIGINT, signal.SIGTERM):
            self.assertEqual(self.interrupt(sig), 130)
            self.assertEqual(self.entries(), ["m"])

    def test_killed_leaves_nothing_that_loads(self):
        self.assertEqual(self.interrupt(signal.SIGKILL), -signal.SIGKILL)
        left = [name for name in self.entries() if name != "m"]
        self.assertEqual(len(left), 1)
        self.assertTrue(left[0].startswith(".p."), left)
        self.expect_error(["inspect", self.dir / left[0]], "unfinished pack")
        self.expect_error(["run", self.dir / left[0], "Hello"], "unfinished pack")
        self.expect_error(["verify", self.dir / left[0]], "unfinished pack")
        # The next attempt says what it found and replaces it.
        done = self.pack()
        self.assertIn(left[0], done.err)
        self.assertEqual(self.entries(), ["m", "p"])
        self.expect_ok("verify", self.dir / "p")


if __name__ == "__main__":
    main()
