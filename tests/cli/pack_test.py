"""pack and verify: the same bytes from a pack, damage is always found, nothing half-made loads."""

import pathlib
import random
import shutil
import signal
import time

from support import DEMO, CliTest, main, moeflux, start

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures"


# One of each way in which files hold experts, and some mixers.
MODELS = ("qwen3_5_moe-bf16", "qwen3_5_moe-mlx4", "deepseek_v3-fp8", "deepseek_v3-embed_q", "deepseek_v3-kimi_k25", "gpt_oss-bf16",
          "gpt_oss-mxfp4", "mixtral-bf16", "qwen3_moe-tied", "qwen3_next-mlx4")


class Pack(CliTest):
    def pack(self, model=DEMO, name="packed"):
        out = self.dir / name
        self.expect_ok("pack", model, "--out", out)
        return out

    def logits_hash(self, model, *more):
        done = self.expect_ok("logits", model, "--tokens", "1,2,3,5,7,11", "--out", self.dir / "logits.safetensors", "-t", 1, *more)
        data = (self.dir / "logits.safetensors").read_bytes()
        (self.dir / "logits.safetensors").unlink()
        return data, done

    def test_the_same_bytes_for_every_fixture(self):
        for model in (FIXTURES / name for name in MODELS):
            with self.subTest(model.name):
                packed = self.pack(model, model.name)
                self.assertEqual(self.logits_hash(packed)[0], self.logits_hash(model)[0])
                self.assertEqual(self.logits_hash(packed, "--decode")[0], self.logits_hash(model)[0])
                shutil.rmtree(packed)

    def test_it_needs_no_original_and_streams(self):
        copy = self.copy_model()
        packed = self.pack(copy)
        shutil.rmtree(copy)
        want = self.expect_ok("run", DEMO, "HAMLET", "-n", 12, "--temp", 0, "-t", 1).out
        self.assertEqual(self.expect_ok("run", packed, "HAMLET", "-n", 12, "--temp", 0, "-t", 1).out, want)
        least = self.expect_ok("plan", packed, "--ctx-size", 64, "--json").json["memory"]["least_bytes"]
        for io in ("uring", "pread"):
            text = moeflux("run", packed, "HAMLET", "-n", 12, "--temp", 0, "-t", 1, "-c", 64, "--ram", least + 3_000_000, "--io", io)
            if text.code != 0 and "io_uring" in text.err:
                continue  # this kernel has none
            self.assertEqual((text.code, text.out), (0, want), text.err)

    def test_an_intact_pack(self):
        packed = self.pack()
        value = self.expect_ok("verify", packed, "--json").json
        self.assertTrue(value["intact"])
        self.assertEqual((value["n_records"], value["n_faults"]), (256, 0))

    def test_every_flipped_bit_of_a_record_is_found(self):
        packed = self.pack()
        experts = packed / "experts.bin"
        whole = experts.read_bytes()
        record = len(whole) // 256
        order = random.Random(1)
        for _ in range(12):
            bit = order.randrange(8 * len(whole))
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            experts.write_bytes(damaged)
            value = moeflux("verify", packed, "--json")
            self.assertEqual(value.code, 1, bit)
            self.assertEqual(value.json["n_faults"], 1)
            number = bit // 8 // record
            fault = str(value.json["faults"][0])
            self.assertIn(str(number % 32), fault)
            # And when it is read to be used.
            done = moeflux("logits", packed, "--tokens", "1,2,3", "--out", self.dir / "l.safetensors", "-t", 1)
            self.assertEqual(done.code, 2, bit)
            for part in ("experts.bin", f"layer {number // 32}", f"expert {number % 32}"):
                self.assertIn(part, done.err)
        experts.write_bytes(whole)
        self.expect_ok("verify", packed)

    def test_records_that_changed_places(self):
        packed = self.pack()
        experts = packed / "experts.bin"
        data = bytearray(experts.read_bytes())
        record = len(data) // 256
        data[:record], data[record:2 * record] = data[record:2 * record], data[:record]
        experts.write_bytes(data)
        self.assertEqual(moeflux("verify", packed, "--json").json["n_faults"], 2)

    def test_damage_elsewhere(self):
        packed = self.pack()
        for name in ("trunk.safetensors", "pack.index", "config.json", "tokenizer.json"):
            whole = (packed / name).read_bytes()
            for damaged in (whole[:-1], whole[: len(whole) // 2], b"", whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:]):
                (packed / name).write_bytes(damaged)
                self.assertNotEqual(moeflux("verify", packed).code, 0, name)
            (packed / name).unlink()
            self.assertNotEqual(moeflux("verify", packed).code, 0, name)
            (packed / name).write_bytes(whole)
        self.expect_ok("verify", packed)

    def test_a_mutated_index_is_an_error_or_harmless(self):
        packed = self.pack()
        index = packed / "pack.index"
        whole = index.read_bytes()
        order = random.Random(2)
        for _ in range(25):
            damaged = bytearray(whole)
            for _ in range(order.choice((1, 2, 8))):
                damaged[order.randrange(len(damaged))] = order.randrange(256)
            index.write_bytes(damaged[: order.choice((len(damaged), order.randrange(len(damaged))))])
            done = moeflux("inspect", packed)
            self.assertIn(done.code, (0, 1, 2), done.err)
            if bytes(damaged) != whole:
                self.assertNotEqual(moeflux("verify", packed).code, 0)

    def test_refusals(self):
        packed = self.pack()
        self.expect_error(["pack", DEMO, "--out", packed], "packed")
        self.expect_error(["pack", DEMO, "--out", self.dir / "no" / "where"], "where")
        self.expect_error(["pack", self.dir / "none", "--out", self.dir / "x"], "none")
        self.expect_error(["verify", DEMO], "pack")
        self.assertEqual(sorted(path.name for path in self.dir.iterdir()), ["packed"])

    def test_interrupted(self):
        for number in (signal.SIGINT, signal.SIGKILL):
            for delay in (0.0, 0.02):
                out = self.dir / "cut"
                process = start("pack", DEMO, "--out", out)
                time.sleep(delay)
                process.send_signal(number)
                process.communicate()
                if process.returncode == 0:  # it was done already
                    self.expect_ok("verify", out)
                    shutil.rmtree(out)
                    continue
                self.assertFalse(out.exists())
                for left in self.dir.iterdir():
                    self.assertNotEqual(moeflux("inspect", left).code, 0, left)
                # And the next one goes through.
                self.expect_ok("pack", DEMO, "--out", out)
                self.expect_ok("verify", out)
                shutil.rmtree(out)


if __name__ == "__main__":
    main()
