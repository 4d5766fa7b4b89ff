"""run and demo: where the prompt comes from, what comes out, how it stops."""

import os
import pty
import re
import signal
import subprocess
import time

from support import BINARY, DEMO, FIXTURES, CliTest, default_signals, ints, main, moeflux, read_golden, start

PROMPT = "HAMLET To be, or not to be"
MODE = re.compile(r"^moeflux: demo \(\S+, 8 layers\) \| cpu \S+, \d+ threads? \| fast \| kv f32 \| ctx 4096 \| all 256 experts in memory \| seed (\d+)$", re.M)
CLOSING = re.compile(
    r"^moeflux: prefill (\d+) tokens, [\d.-]+ tok/s \| decode (\d+) tokens, [\d.-]+ tok/s \| hit rate [\d.]+ % \| "
    r"[\d.]+ \w?B read per token \| logits ([0-9a-f]{16}) \| (\w+)$", re.M)


def wait_for_mode_line(process):
    """From then on SIGINT is caught."""
    for line in process.stderr:
        if b"seed" in line:
            return


class Prompt(CliTest):
    def greedy(self, *args, **more):
        return self.expect_ok("run", DEMO, *args, "--temp", "0", "-n", "8", **more)

    def test_argument_file_and_standard_input_are_the_same(self):
        text = self.greedy(PROMPT).out
        self.assertTrue(text.strip())
        self.assertEqual(self.greedy("-p", PROMPT).out, text)
        self.assertEqual(self.greedy("--prompt", PROMPT).out, text)
        self.assertEqual(self.greedy(stdin=PROMPT.encode()).out, text)
        # A newline at the end is the editor's, not the user's.
        self.assertEqual(self.greedy(stdin=PROMPT.encode() + b"\n").out, text)
        self.assertEqual(self.greedy("-f", self.write("p.txt", PROMPT + "\r\n")).out, text)
        self.assertNotEqual(self.greedy(PROMPT + "\n").out, text)

    def test_prompt_is_echoed_only_on_request(self):
        text = self.greedy(PROMPT).out
        self.assertFalse(text.startswith(PROMPT))
        self.assertEqual(self.greedy(PROMPT, "--echo").out, PROMPT + text)

    def test_prompt_may_be_the_name_of_a_verb_or_start_with_a_dash(self):
        self.assertTrue(self.greedy("version").out)
        self.assertTrue(self.expect_ok("run", DEMO, "-n", "2", "--", "-- Exit HAMLET").out)

    def test_two_prompts(self):
        path = self.write("p.txt", PROMPT)
        for more in (["-p", "a", "b"], ["a", "-p", "b"], ["-p", "a", "--prompt", "b"], ["-p", "a", "-f", path], ["a", "-f", path]):
            self.expect_error(["run", DEMO, *more], "error")

    def test_no_prompt(self):
        self.expect_error(["run", DEMO, ""], "the prompt is empty")
        self.expect_error(["run", DEMO], "the prompt is empty")  # standard input is empty
        self.expect_error(["run", DEMO], "the prompt is empty", stdin=b"\n")
        self.expect_error(["run", DEMO, "-f", self.write("empty", "")], "the prompt is empty")
        self.expect_error(["run", DEMO, "-f", self.dir / "absent.txt"], "absent.txt", "No such file")
        self.expect_error(["run", DEMO, "-f", self.dir], self.dir, "folder")
        self.expect_error(["run", DEMO, "-f", "/dev/zero"], "/dev/zero")

    def test_terminal_as_standard_input_is_not_waited_for(self):
        master, slave = pty.openpty()
        done = subprocess.run([BINARY, "run", str(DEMO)], stdin=slave, capture_output=True, timeout=60)
        os.close(master)
        os.close(slave)
        self.assertEqual(done.returncode, 2)
        self.assertIn(b"no prompt", done.stderr)

    def test_prompt_longer_than_the_context(self):
        result = moeflux("run", DEMO, PROMPT, "-c", "4")
        self.assertEqual((result.code, result.raw), (2, b""))
        self.assertRegex(result.err, r"moeflux: error: .*\b4\b")

    def test_context_longer_than_the_model_allows(self):
        self.expect_error(["run", DEMO, PROMPT, "-c", "100000"], "100000")
        self.expect_error(["run", DEMO, PROMPT, "-c", str(2**62)], "error")

    def test_model_without_tokenizer(self):
        self.expect_error(["run", FIXTURES / "qwen3_5_moe-bf16", "hello"], "no tokenizer.json", "logits")

    def test_special_tokens_are_plain_text_unless_asked(self):
        text = "<|im_start|>user\nhi<|im_end|>"
        plain = self.greedy(text, "--json").json
        special = self.greedy(text, "--json", "--special").json
        self.assertNotIn(3057, plain["prompt_tokens"])
        self.assertEqual(special["prompt_tokens"][0], 3057)
        self.assertEqual(special["prompt_tokens"][-1], 3058)


class Output(CliTest):
    def test_text_on_stdout_lines_on_stderr(self):
        result = self.expect_ok("run", DEMO, PROMPT, "-n", "12", "-s", "7")
        self.assertTrue(result.out.endswith("\n"))
        mode, closing = MODE.search(result.err), CLOSING.search(result.err)
        self.assertTrue(mode and closing, result.err)
        self.assertLess(mode.start(), closing.start())
        self.assertEqual(mode.group(1), "7")
        self.assertEqual(closing.group(4), "max_tokens")
        self.assertNotEqual(int(closing.group(3), 16), 0)

    def test_mode_line_says_what_was_asked_for(self):
        result = self.expect_ok("run", f"{DEMO}/", PROMPT, "-n", "1", "--precision", "exact", "--kv", "f16", "-c", "64",
                                "-t", "1")
        self.assertRegex(result.err, r"moeflux: demo \(.*, 1 thread.* \| exact \| kv f16 \| ctx 64 \| all 256 experts in memory \| seed \d+")

    def test_a_seed_gives_the_same_text_twice(self):
        def text(*seed):
            return self.expect_ok("run", DEMO, PROMPT, "-n", "24", *seed).out

        self.assertEqual(text("-s", "42"), text("--seed", "42"))
        self.assertNotEqual(text("-s", "42"), text("-s", "43"))

    def test_a_random_seed_is_printed_and_repeats_the_run(self):
        first = self.expect_ok("run", DEMO, PROMPT, "-n", "24")
        seed = MODE.search(first.err).group(1)
        self.assertEqual(self.expect_ok("run", DEMO, PROMPT, "-n", "24", "-s", seed).out, first.out)
        second = self.expect_ok("run", DEMO, PROMPT, "-n", "1", "-s", "-1")
        self.assertNotEqual(MODE.search(second.err).group(1), seed)

    def test_json(self):
        plain = self.expect_ok("run", DEMO, PROMPT, "-n", "10", "-s", "5")
        value = self.expect_ok("run", DEMO, PROMPT, "-n", "10", "-s", "5", "--json").json
        self.assertEqual(value["text"] + "\n" * (not value["text"].endswith("\n")), plain.out)
        self.assertEqual(len(value["tokens"]), 10)
        self.assertEqual(value["seed"], 5)
        self.assertEqual(value["stop_reason"], "max_tokens")
        self.assertEqual(value["stats"]["prefill_tokens"], len(value["prompt_tokens"]))
        self.assertEqual(value["stats"]["decode_tokens"], 9)  # the last token is never computed
        self.assertIsInstance(value["stats"]["bytes_read"], int)
        self.assertGreater(value["stats"]["decode_tokens_per_second"], 0)
        self.assertEqual(value["stats"]["logits_hash"], CLOSING.search(plain.err).group(3))
        ids = ",".join(map(str, value["tokens"]))
        self.assertEqual(self.expect_ok("tokenize", DEMO, "--decode", ids).out, value["text"])

    def test_threads_chunks_and_isa_do_not_change_a_byte(self):
        def hash_of(*args):
            return CLOSING.search(self.expect_ok("run", DEMO, PROMPT, "-n", "4", "--temp", "0", *args).err).group(3)

        expected = hash_of()
        for args in (["-t", "1"], ["-t", "5"], ["--chunk", "1"], ["--chunk", "7"], ["--isa", "scalar"]):
            self.assertEqual(hash_of(*args), expected, args)

    def test_sampling_flags_reach_the_sampler(self):
        def text(*args):
            return self.expect_ok("run", DEMO, PROMPT, "-n", "24", "-s", "3", *args).out

        greedy = text("--temp", "0")
        self.assertEqual(text("--top-k", "1"), greedy)
        self.assertEqual(text("--min-p", "0.999999"), greedy)
        self.assertEqual(text("--top-p", "0.0000001"), greedy)
        self.assertNotEqual(text("--temp", "0", "--repeat-penalty", "1.8"), greedy)
        self.assertNotEqual(text("--temp", "0", "--frequency-penalty", "5"), greedy)
        self.assertNotEqual(text("--temp", "0", "--presence-penalty", "5"), greedy)
        self.assertEqual(text("--temp", "0", "--presence-penalty", "5", "--repeat-last-n", "0"), greedy)

    def test_stops_at_a_full_context(self):
        value = self.expect_ok("run", DEMO, PROMPT, "-c", "20", "--ignore-eos", "--json").json
        self.assertEqual(value["stop_reason"], "context_full")
        self.assertGreaterEqual(len(value["prompt_tokens"]) + len(value["tokens"]), 20)

    def test_greedy_continuation_of_the_golden_prompt(self):
        golden = read_golden(FIXTURES / "demo-golden" / "golden.safetensors")
        prompt, expected = ints(golden["greedy_prompt"][2]), ints(golden["greedy"][2])
        text = self.expect_ok("tokenize", DEMO, "--decode", ",".join(map(str, prompt))).out
        value = self.expect_ok("run", DEMO, text, "--temp", "0", "-n", len(expected), "--precision", "exact",
                               "--ignore-eos", "--json").json
        self.assertEqual(tuple(value["prompt_tokens"]), prompt)
        self.assertEqual(tuple(value["tokens"]), expected)


class Demo(CliTest):
    def test_demo_says_that_it_is_a_toy_and_echoes_its_prompt(self):
        result = self.expect_ok("demo", "-n", "8", "-s", "1")
        self.assertIn("toy", result.err)
        self.assertTrue(result.out.startswith(PROMPT), result.out)
        self.assertGreater(len(result.out), len(PROMPT) + 1)
        self.assertTrue(MODE.search(result.err) and CLOSING.search(result.err), result.err)

    def test_demo_with_a_prompt_of_ones_own(self):
        result = self.expect_ok("demo", "LADY MACBETH Out", "-n", "3", "--temp", "0")
        self.assertTrue(result.out.startswith("LADY MACBETH Out"))
        self.assertFalse(self.expect_ok("demo", "ROMEO", "-n", "3", "--no-echo").out.startswith("ROMEO"))


class Interrupt(CliTest):
    def interrupted(self, *args):
        process = start("run", DEMO, PROMPT, "--ignore-eos", "--temp", "0", "-c", "8192", *args)
        if "--json" in args:
            wait_for_mode_line(process)
            time.sleep(0.3)
        else:
            self.assertTrue(process.stdout.read(1))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err.decode()

    def test_ctrl_c_ends_with_the_closing_line(self):
        code, out, err = self.interrupted()
        self.assertEqual(code, 130, err)
        self.assertEqual(CLOSING.search(err).group(4), "cancelled")
        self.assertTrue(out.endswith(b"\n"))

    def test_ctrl_c_still_gives_the_json_object(self):
        code, out, err = self.interrupted("--json")
        self.assertEqual(code, 130, err)
        self.assertIn(b'"stop_reason":"cancelled"', out)

    def test_the_second_ctrl_c_kills(self):
        # A pipe that nobody reads blocks the first one's clean end.
        read_end, write_end = os.pipe()
        process = subprocess.Popen([BINARY, "run", str(DEMO), PROMPT, "--ignore-eos", "-c", "8192"], stdout=write_end,
                                   stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, preexec_fn=default_signals)
        os.set_blocking(write_end, False)
        try:
            while True:
                os.write(write_end, b"x" * 65536)
        except BlockingIOError:
            pass
        os.close(write_end)
        wait_for_mode_line(process)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        self.assertIsNone(process.poll())
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(timeout=60), -signal.SIGINT)
        process.stderr.close()
        os.close(read_end)


if __name__ == "__main__":
    main()
