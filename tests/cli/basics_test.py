"""Help, version, wrong arguments, standard streams."""

import os
import re
import subprocess

from support import BINARY, DEMO, CliTest, default_signals, main, moeflux, start

VERBS = ["run", "demo", "logits", "perplexity", "tokenize", "inspect", "simulate", "version"]


class Help(CliTest):
    def test_alone_prints_help_that_names_every_verb(self):
        alone = self.expect_ok()
        self.assertEqual(alone.err, "")
        for verb in VERBS:
            self.assertRegex(alone.out, rf"(?m)^  {verb}\b")
        for word in ("--help", "-h", "help"):
            self.assertEqual(self.expect_ok(word).out, alone.out)

    def test_every_verb_has_help_with_examples(self):
        for verb in VERBS:
            for flag in ("--help", "-h"):
                result = self.expect_ok(verb, flag)
                self.assertEqual(result.err, "")
                self.assertIn(f"moeflux {verb}", result.out)
                self.assertIn("Examples:", result.out)

    def test_help_names_every_flag(self):
        flags = {
            "run": "-f -n --temp --top-k --top-p --min-p -s --seed -c --ctx-size -t --threads --precision --kv --isa "
                   "--chunk --repeat-penalty --frequency-penalty --presence-penalty --repeat-last-n --ignore-eos "
                   "--special --json --echo",
            "demo": "-n --temp -s -t --precision",
            "logits": "--tokens --tokens-file --out --hidden --decode --precision --kv --json",
            "perplexity": "-f --ctx --json --precision",
            "tokenize": "-f --ids --decode --special --json",
            "inspect": "--json",
            "simulate": "--cache",
        }
        for verb, names in flags.items():
            text = moeflux(verb, "--help").out
            for name in names.split():
                self.assertRegex(text, rf"(?<![\w-]){re.escape(name)}(?![\w-])", f"{verb} {name}")

    def test_version(self):
        text = self.expect_ok("version").out
        self.assertRegex(text, r"^moeflux \d+\.\d+\.\d+\n$")
        self.assertEqual(self.expect_ok("--version").out, text)
        self.assertEqual("moeflux " + self.expect_ok("version", "--json").json["version"] + "\n", text)


class WrongArguments(CliTest):
    def test_unknown_verb_suggests_the_nearest(self):
        self.expect_error(["runn"], "unknown verb runn", "moeflux run")
        self.expect_error(["perplex"], "unknown verb perplex", "moeflux perplexity")
        self.expect_error(["tokenise"], "unknown verb tokenise", "moeflux tokenize")
        self.assertNotIn("Did you mean", self.expect_error(["xyzzy-plugh"], "xyzzy-plugh", "--help").err)
        self.expect_error(["--bogus"], "unknown option --bogus")

    def test_a_folder_in_place_of_a_verb(self):
        self.expect_error([DEMO], f"moeflux run {DEMO}")

    def test_bad_flags_and_values(self):
        for args, fragment in [
            (["run", DEMO, "x", "--bogus"], "--bogus"),
            (["run"], "MODEL"),
            (["run", DEMO, "x", "y"], "y"),
            (["run", DEMO, "x", "-n", "many"], "many"),
            (["run", DEMO, "x", "-n", "-2"], "-2"),
            (["run", DEMO, "x", "--temp", "nan"], "nan"),
            (["run", DEMO, "x", "--temp", "-1"], "-1"),
            (["run", DEMO, "x", "--temp", "inf"], "inf"),
            (["run", DEMO, "x", "--min-p", "2"], "2"),
            (["run", DEMO, "x", "--repeat-penalty", "0"], "0"),
            (["run", DEMO, "x", "--seed", "1.5"], "1.5"),
            (["run", DEMO, "x", "--seed", "18446744073709551616"], "18446744073709551616"),
            (["run", DEMO, "x", "-t", "-1"], "-1"),
            (["run", DEMO, "x", "-c", "-5"], "-5"),
            (["run", DEMO, "x", "--precision", "sloppy"], "sloppy"),
            (["run", DEMO, "x", "--kv", "q4"], "q4"),
            (["run", DEMO, "x", "--isa", "mmx"], "mmx"),
            (["run", DEMO, "x", "-f", "y"], "-f"),
            (["logits", DEMO, "--tokens", "1"], "--out"),
            (["perplexity", DEMO, "--ctx", "0"], "0"),
            (["version", "now"], "now"),
        ]:
            with self.subTest(args=args):
                self.expect_error(args, fragment)


class StandardStreams(CliTest):
    def test_reader_that_goes_away_ends_the_run_quietly(self):
        process = start("run", DEMO, "HAMLET", "--ignore-eos", "--temp", "0", "-n", "100000", "-c", "8192")
        self.assertTrue(process.stdout.read(1))
        process.stdout.close()
        err = process.stderr.read().decode()
        process.stderr.close()
        self.assertEqual(process.wait(timeout=60), 0, err)
        self.assertNotIn("error", err)

    def test_full_standard_output_is_an_error(self):
        with open("/dev/full", "wb") as full:
            for args in (["version"], ["inspect", DEMO, "--json"], ["run", DEMO, "HAMLET", "-n", "3"], ["run", "--help"]):
                done = subprocess.run([BINARY, *map(str, args)], stdout=full, stderr=subprocess.PIPE,
                                      stdin=subprocess.DEVNULL)
                self.assertEqual(done.returncode, 1, args)
                self.assertIn(b"moeflux: error: cannot write to standard output", done.stderr)

    def test_closed_standard_output_is_an_error(self):
        def closed():
            default_signals()
            os.close(1)

        out = self.dir / "l.safetensors"
        for args in (["version"], ["logits", DEMO, "--tokens", "1,2", "--out", out]):
            done = subprocess.run([BINARY, *map(str, args)], preexec_fn=closed, stderr=subprocess.PIPE,
                                  stdin=subprocess.DEVNULL)
            self.assertEqual(done.returncode, 1, args)
            self.assertIn(b"moeflux: error: cannot write to standard output", done.stderr)

    def test_closed_standard_error_is_not(self):
        done = subprocess.run([BINARY, "run", str(DEMO), "HAMLET", "-n", "3", "--temp", "0"], stdout=subprocess.PIPE,
                              stdin=subprocess.DEVNULL, preexec_fn=lambda: os.close(2))
        self.assertEqual(done.returncode, 0)
        self.assertEqual(done.stdout, moeflux("run", DEMO, "HAMLET", "-n", "3", "--temp", "0").raw)


if __name__ == "__main__":
    main()
