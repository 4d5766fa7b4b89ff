"""logits: the file, its shapes, its values, its failures."""

import os
import resource
import signal
import subprocess

from support import BINARY, DEMO, FIXTURES, CliTest, floats, ints, main, read_golden, read_safetensors, start

TINY = FIXTURES / "qwen3_5_moe-mlx4"


class Logits(CliTest):
    def setUp(self):
        super().setUp()
        self.golden = read_golden(TINY / "golden.safetensors")
        self.tokens = ints(self.golden["tokens"][2])
        self.tokens_file = self.write("tokens.txt", "\n".join(map(str, self.tokens)) + "\n")

    def logits(self, name, *args):
        out = self.dir / name
        self.expect_ok("logits", TINY, "--tokens-file", self.tokens_file, "--out", out, *args)
        return out

    def test_shapes_and_values(self):
        tensors = read_safetensors(self.logits("l.safetensors", "--hidden", "--precision", "exact"))
        dtype, shape, raw = tensors["logits"]
        self.assertEqual((dtype, shape), ("F32", self.golden["logits"][1]))
        error = max(abs(a - b) for a, b in zip(floats(raw), floats(self.golden["logits"][2])))
        self.assertLessEqual(error, 2e-3)
        names = {name for name in self.golden if name.startswith("hidden.")}
        self.assertEqual(set(tensors), names | {"logits"})
        for name in names:
            self.assertEqual(tensors[name][:2], ("F32", self.golden[name][1]), name)
            ours, theirs = floats(tensors[name][2]), floats(self.golden[name][2])
            difference = sum((a - b) ** 2 for a, b in zip(ours, theirs)) ** 0.5
            self.assertLessEqual(difference, 1e-3 * sum(b * b for b in theirs) ** 0.5, name)

    def test_decode_threads_and_chunks_give_the_same_bytes(self):
        for precision in ("exact", "fast"):
            expected = self.logits("a", "--hidden", "--precision", precision).read_bytes()
            for args in (["--decode"], ["--chunk", "7"], ["-t", "5"], ["--chunk", "1", "-t", "1"]):
                got = self.logits("b", "--hidden", "--precision", precision, *args).read_bytes()
                self.assertTrue(got == expected, (precision, args))

    def test_without_hidden_only_logits(self):
        self.assertEqual(set(read_safetensors(self.logits("l"))), {"logits"})

    def test_tokens_from_the_command_line_or_a_file(self):
        a, b = self.dir / "a", self.dir / "b"
        self.expect_ok("logits", TINY, "--tokens", "1, 2,3", "--out", a)
        self.expect_ok("logits", TINY, "--tokens-file", self.write("t", "1 2,\n\t3\n"), "--out", b)
        self.assertEqual(a.read_bytes(), b.read_bytes())
        self.assertEqual(read_safetensors(a)["logits"][1][0], 3)

    def test_summary(self):
        out = self.dir / "l.safetensors"
        line = self.expect_ok("logits", TINY, "--tokens", "1,2,3", "--out", out, "--hidden").out
        self.assertRegex(line, r"^\S+l\.safetensors: logits \[3, \d+\], hidden\.0\.\.\d+ \[3, \d+\], .* [0-9a-f]{16}\n$")
        value = self.expect_ok("logits", TINY, "--tokens", "1,2,3", "--out", out, "--hidden", "--json").json
        self.assertEqual(value["n_tokens"], 3)
        self.assertEqual(value["file_bytes"], out.stat().st_size)
        self.assertIn(value["logits_hash"], line)
        self.assertEqual(value["n_hidden"], sum(n.startswith("hidden.") for n in self.golden))

    def test_replaces_what_is_there_and_leaves_nothing_else(self):
        out = self.write("o/l.safetensors", "old")
        self.expect_ok("logits", TINY, "--tokens", "1", "--out", out)
        self.assertIn("logits", read_safetensors(out))
        self.assertEqual(os.listdir(out.parent), ["l.safetensors"])

    def test_a_link_is_followed(self):
        target = self.write("real", "old")
        link = self.dir / "link"
        link.symlink_to(target)
        self.expect_ok("logits", TINY, "--tokens", "1", "--out", link)
        self.assertTrue(link.is_symlink())
        self.assertIn("logits", read_safetensors(target))

    def test_errors_leave_no_file(self):
        out = self.dir / "o" / "l.safetensors"
        out.parent.mkdir()
        for args, fragments in [
            (["--tokens", "1,100000"], ["100000"]),
            (["--tokens", "-1"], ["-1"]),
            (["--tokens", "1,two"], ["two"]),
            (["--tokens", ""], ["no token ids"]),
            (["--tokens-file", self.dir / "absent.txt"], ["absent.txt", "No such file"]),
            (["--tokens-file", self.write("bad.txt", "1 2 x")], ["bad.txt", '"x"']),
            (["--tokens-file", self.dir], ["folder"]),
            ([], ["--tokens"]),
            (["--tokens", "1", "--tokens-file", self.tokens_file], ["--tokens"]),
            (["--tokens", "1,2,3", "-c", "2"], ["2"]),
        ]:
            with self.subTest(args=args):
                self.expect_error(["logits", TINY, *args, "--out", out], *fragments)
                self.assertEqual(os.listdir(out.parent), [])

    def test_outputs_that_cannot_be(self):
        self.expect_error(["logits", TINY, "--tokens", "1", "--out", self.dir], "names no file")
        self.expect_error(["logits", TINY, "--tokens", "1", "--out", self.dir / "no" / "l"], "no/l")
        self.expect_error(["logits", TINY, "--tokens", "1", "--out", "/dev/null"], "/dev/null", "not a plain file")

    def test_no_room_is_noticed_and_cleaned_up(self):
        out = self.write("o/l", "old")

        def small_files():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

        done = subprocess.run([BINARY, "logits", str(TINY), "--tokens-file", str(self.tokens_file), "--out", str(out)],
                              capture_output=True, preexec_fn=small_files, timeout=60)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(b"moeflux: error: ", done.stderr)
        self.assertIn(str(out).encode(), done.stderr)
        self.assertEqual(os.listdir(out.parent), ["l"])
        self.assertEqual(out.read_text(), "old")

    def test_ctrl_c_leaves_no_file(self):
        out = self.dir / "o" / "l"
        out.parent.mkdir()
        tokens = self.write("many", " ".join(["11"] * 8000))
        process = start("logits", DEMO, "--tokens-file", tokens, "--out", out, "--decode")
        for line in process.stderr:
            if b"ctx" in line:
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130)
        self.assertEqual(os.listdir(out.parent), [])


if __name__ == "__main__":
    main()
