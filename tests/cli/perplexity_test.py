"""perplexity: the protocol, computed a second time from the logits file."""

import math
import signal

from support import DEMO, CliTest, floats, main, read_safetensors, start

TEXT = ("HAMLET To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer the slings and "
        "arrows of outrageous fortune, or to take arms against a sea of troubles, and by opposing end them. ") * 2


class Perplexity(CliTest):
    def recomputed(self, ids, ctx):
        """(nll, windows) by the definition: windows of ctx + 1 tokens, stride ctx, from an empty context."""
        means = []
        for begin in range(0, len(ids) - ctx, ctx):
            window = ids[begin:begin + ctx + 1]
            out = self.dir / "l"
            self.expect_ok("logits", DEMO, "--tokens", ",".join(map(str, window[:-1])), "--out", out)
            _, (n, vocab), raw = read_safetensors(out)["logits"]
            values, total = floats(raw), 0.0
            for i in range(n):
                row = values[i * vocab:(i + 1) * vocab]
                highest = max(row)
                total += highest + math.log(sum(math.exp(v - highest) for v in row)) - row[window[i + 1]]
            means.append(total / n)
        return sum(means) / len(means), len(means)

    def test_protocol(self):
        path = self.write("text.txt", TEXT)
        ids = self.expect_ok("tokenize", DEMO, TEXT, "--json").json["ids"]
        value = self.expect_ok("perplexity", DEMO, "-f", path, "--ctx", "24", "--json").json
        nll, windows = self.recomputed(ids, 24)
        self.assertGreater(windows, 2)
        self.assertEqual((value["tokens"], value["windows"]), (len(ids), windows))
        self.assertAlmostEqual(value["nll"], nll, delta=1e-9)
        self.assertAlmostEqual(value["perplexity"], math.exp(nll), delta=1e-6)
        self.assertEqual(value["predictions"], windows * 24)

    def test_readable_line_standard_input_and_closing_line(self):
        value = self.expect_ok("perplexity", DEMO, "-c", "16", "--json", stdin=TEXT.encode()).json
        result = self.expect_ok("perplexity", DEMO, "--ctx-size", "16", stdin=TEXT.encode())
        self.assertRegex(result.out, r"^perplexity \d+\.\d+ \(nll .* windows of 16\)\n$")
        self.assertAlmostEqual(float(result.out.split()[1]), value["perplexity"], delta=1e-4)
        self.assertRegex(result.err, r"(?m)^moeflux: prefill \d+ tokens.* \| logits [0-9a-f]{16}$")

    def test_the_smallest_text_that_is_enough(self):
        n = len(self.expect_ok("tokenize", DEMO, "To be or not", "--json").json["ids"])
        path = self.write("t", "To be or not")
        self.assertEqual(self.expect_ok("perplexity", DEMO, "-f", path, "-c", n - 1, "--json").json["windows"], 1)
        self.expect_error(["perplexity", DEMO, "-f", path, "-c", n], f"{n} tokens", str(n + 1))

    def test_errors(self):
        self.expect_error(["perplexity", DEMO, "-f", self.dir / "absent.txt"], "absent.txt")
        self.expect_error(["perplexity", DEMO, "-f", self.write("empty", "")], "0 tokens", "1025")
        self.expect_error(["perplexity", DEMO, "-f", self.write("short", "To be")], "tokens", "1025")

    def test_ctrl_c(self):
        process = start("perplexity", DEMO, "-f", self.write("long", TEXT * 200))
        for line in process.stderr:
            if b"ctx" in line:
                break
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        self.assertEqual((process.returncode, out), (130, b""))


if __name__ == "__main__":
    main()
