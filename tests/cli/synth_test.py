"""synth: random models of published shapes, whole or not at all."""

import hashlib
import json
import os
import resource
import signal
import struct
import subprocess
import time

from support import BINARY, CliTest, floats, main, read_safetensors, start


def digest(folder):
    """name -> hash of every file of a model."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def tiny(out, *more):
    return ["synth", "--shape", "tiny", "--out", out, *more]


class Synth(CliTest):
    def leftovers(self):
        return [path.name for path in self.dir.iterdir()]

    def test_every_verb_works_on_it(self):
        model = self.dir / "m"
        made = self.expect_ok(*tiny(model, "--layers", 4, "--experts", 8, "--json"))
        self.assertEqual((made.json["n_layers"], made.json["n_experts"], made.json["n_files"]), (4, 8, 1))
        self.assertIn("needs", made.err)
        self.assertIn("free", made.err)
        info = self.expect_ok("inspect", model, "--json").json
        self.assertEqual((info["n_layers"], info["n_experts"], info["top_k"]), (4, 8, 4))
        self.assertEqual((info["missing"], info["warnings"]), ([], []))
        self.assertEqual(set(info["expert_formats"]), {"affine 4-bit g64"})
        self.assertEqual(set(info["trunk_formats"]), {"affine 4-bit g64", "affine 8-bit g64", "f32"})
        self.assertEqual(len(set(info["mixers"])), 2)
        self.assertTrue(self.expect_ok("run", model, "Hello", "-n", 8, "--seed", 1).raw)
        text = "caf\u00e9 \U0001f600\n"
        ids = self.expect_ok("tokenize", model, text, "--json").json
        self.assertEqual(list(text.encode()), [token["id"] for token in ids["tokens"]])

    def test_activations_are_plausible(self):
        model, out = self.dir / "m", self.dir / "l"
        self.expect_ok(*tiny(model, "--skew", 2))
        self.expect_ok("logits", model, "--tokens", ",".join(str(i * 37 % 512) for i in range(32)), "--out", out, "--hidden")
        for name, (_, shape, raw) in read_safetensors(out).items():
            values = floats(raw)
            rms = (sum(v * v for v in values) / len(values)) ** 0.5  # a NaN fails the comparisons
            low, high = (1.5, 4) if name == "logits" else (0.8, 2)
            self.assertTrue(low < rms < high, f"{name}: {rms}")
            self.assertTrue(max(map(abs, values)) < 20 * rms, name)

    def test_dense_layers(self):
        model = self.dir / "m"
        made = self.expect_ok("synth", "--shape", "v3", "--layers", 3, "--dense", 1, "--headers-only", "--out", model, "--json")
        self.assertEqual(made.json["n_layers"], 3)
        config = json.loads((model / "config.json").read_text())
        self.assertEqual(config["first_k_dense_replace"], 1)
        info = self.expect_ok("inspect", model, "--json").json
        self.assertEqual((info["missing"], info["n_experts"]), ([], 256))
        self.expect_error(["synth", "--shape", "v3", "--dense", 4, "--out", self.dir / "n"], "--dense 4", "has 3")
        self.expect_error(tiny(self.dir / "n", "--dense", 1), "--dense 1", "has 0")
        self.assertEqual(self.leftovers(), ["m"])

    def test_seed(self):
        for name, seed in (("a", 7), ("b", 7), ("c", 8)):
            self.expect_ok(*tiny(self.dir / name, "--layers", 4, "--seed", seed))
        a, b, c = (digest(self.dir / name) for name in "abc")
        self.assertEqual(a, b)
        self.assertNotEqual(a["model.safetensors"], c["model.safetensors"])
        self.assertEqual(a["config.json"], c["config.json"])

    def test_a_cut_model_is_part_of_the_whole(self):
        self.expect_ok(*tiny(self.dir / "all"))
        self.expect_ok(*tiny(self.dir / "cut", "--layers", 5, "--experts", 16))
        whole = read_safetensors(self.dir / "all" / "model.safetensors")
        for name, (dtype, shape, raw) in read_safetensors(self.dir / "cut" / "model.safetensors").items():
            self.assertEqual(whole[name][0], dtype)
            self.assertEqual(whole[name][2][:len(raw)], raw, name)

    def test_shards(self):
        self.expect_ok(*tiny(self.dir / "one"))
        made = self.expect_ok(*tiny(self.dir / "many", "--shard-size", 0.004, "--json")).json
        self.assertGreater(made["n_files"], 2)
        index = json.loads((self.dir / "many" / "model.safetensors.index.json").read_text())
        merged = {}
        for path in (self.dir / "many").glob("*.safetensors"):
            tensors = read_safetensors(path)
            self.assertTrue(all(index["weight_map"][name] == path.name for name in tensors))
            merged.update(tensors)
        self.assertEqual(merged, read_safetensors(self.dir / "one" / "model.safetensors"))
        self.assertEqual(set(index["weight_map"]), set(merged))
        hashes = [self.expect_ok("logits", self.dir / name, "--tokens", "1,2,3", "--out", self.dir / "l", "--json").json
                  ["logits_hash"] for name in ("one", "many")]
        self.assertEqual(*hashes)

    def test_weights_have_mean_and_deviation(self):
        """Decoded here, from the format's definition."""
        self.expect_ok(*tiny(self.dir / "m", "--layers", 4, "--experts", 8))
        tensors = read_safetensors(self.dir / "m" / "model.safetensors")
        base = "language_model.model.layers.3.self_attn.q_proj"
        (_, (rows, words), codes), (_, _, scales), (_, _, biases) = (
            tensors[f"{base}.{part}"] for part in ("weight", "scales", "biases"))
        cols = words * 8
        bf16 = lambda raw: [struct.unpack("<f", b"\0\0" + raw[i:i + 2])[0] for i in range(0, len(raw), 2)]
        s, b = bf16(scales), bf16(biases)
        nibbles = [nibble for byte in codes for nibble in (byte & 15, byte >> 4)]
        values = [s[i // 64] * q + b[i // 64] for i, q in enumerate(nibbles)]
        mean = sum(values) / len(values)
        deviation = (sum(v * v for v in values) / len(values)) ** 0.5
        self.assertLess(abs(mean), 0.01 * deviation)
        self.assertAlmostEqual(deviation * cols ** 0.5, 1.0, delta=0.05)
        self.assertEqual(sorted(set(nibbles)), list(range(16)))

    def test_refuses(self):
        model = self.dir / "m"
        self.expect_ok(*tiny(model, "--layers", 4))
        before = digest(model)
        self.expect_error(tiny(model), "already there", model)
        self.assertEqual(digest(model), before)
        self.write("file", "x")
        self.expect_error(tiny(self.dir / "file"), "already there")
        (self.dir / "link").symlink_to("nowhere")
        self.expect_error(tiny(self.dir / "link"), "already there")
        self.expect_error(tiny(self.dir / "no" / "parent"), "parent")
        self.expect_error(tiny(self.dir / "x", "--layers", 9), "--layers 9", "8 layers")
        self.expect_error(tiny(self.dir / "x", "--experts", 65), "--experts 65")
        self.expect_error(tiny(self.dir / "x", "--experts", 3), "--experts 3", "4 per token")
        self.expect_error(tiny(self.dir / "x", "--skew", -1), "--skew")
        self.expect_error(["synth", "--shape", "tinny", "--out", self.dir / "x"], "tinny", "Did you mean tiny?")
        self.expect_error(["synth", "--out", self.dir / "x"], "--shape")
        self.expect_error(["synth", "--shape", "tiny"], "--out")
        self.expect_error(["synth", "--shape", "v3", "--experts", 12, "--out", self.dir / "x"], "groups")
        self.expect_error(["synth", "--shape", "v3", "--layers", 3, "--out", self.dir / "x"], "at least 4")
        self.assertEqual(sorted(self.leftovers()), ["file", "link", "m"])

    def test_list(self):
        text = self.expect_ok("synth", "--list").out
        for name in ("Qwen3.5-35B-A3B", "35b-a3b", "DeepSeek-V3", "gpt-oss-120b", "tiny"):
            self.assertIn(name, text)
        shapes = {s["name"]: s for s in self.expect_ok("synth", "--list", "--json").json["shapes"]}
        # Experts of 4.5 bits per weight and the trunk: published totals, within what 8-bit routers and norms add.
        for name, gb in (("Qwen3.5-35B-A3B", 19.5), ("Qwen3.5-397B-A17B", 222.9), ("DeepSeek-V3", 377.4),
                         ("Mixtral-8x7B", 26.3), ("GLM-4.5-Air", 60.1), ("MiniMax-M2", 128.7)):
            self.assertAlmostEqual(shapes[name]["tensor_bytes"] / 1e9, gb, delta=gb * 0.005)

    def test_no_room(self):
        """More than any disk has: told before anything is written."""
        limit = os.statvfs(self.dir)
        if limit.f_bavail * limit.f_frsize > 570e9:
            self.skipTest("this disk could hold it")
        self.expect_error(["synth", "--shape", "Kimi-K2", "--out", self.dir / "x"], "not enough room", code=1)
        self.assertEqual(self.leftovers(), [])

    def test_failing_write_leaves_nothing(self):

        def limited():
            resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))

        done = subprocess.run([BINARY, *map(str, tiny(self.dir / "x"))], capture_output=True, preexec_fn=limited)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(b"model.safetensors", done.stderr)
        self.assertEqual(self.leftovers(), [])

    def interrupt(self, sig):
        """A model too large to finish, stopped when its file has appeared."""
        process = start("synth", "--shape", "35b-a3b", "--layers", 1, "--out", self.dir / "x")
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stderr.close)
        deadline = time.monotonic() + 60
        while not list(self.dir.glob(".x.*/*.safetensors")):
            self.assertIsNone(process.poll(), "ended before it could be stopped")
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.005)
        process.send_signal(sig)
        return process.wait(60)

    def test_interrupt_leaves_nothing(self):
        for sig in (signal.SIGINT, signal.SIGTERM):
            self.assertEqual(self.interrupt(sig), 130)
            self.assertEqual(self.leftovers(), [])

    def test_killed_leaves_nothing_that_loads(self):
        self.assertEqual(self.interrupt(signal.SIGKILL), -signal.SIGKILL)
        self.assertFalse((self.dir / "x").exists())
        for path in self.dir.iterdir():
            self.expect_error(["inspect", path], "config.json")


if __name__ == "__main__":
    main()
