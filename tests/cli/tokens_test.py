"""tokenize: ids and text, both ways."""

import json

from support import DEMO, FIXTURES, CliTest, main


class Tokenize(CliTest):
    def ids(self, *args, **more):
        text = self.expect_ok("tokenize", DEMO, *args, "--ids", **more).out
        self.assertTrue(text.endswith("\n"))
        return [int(word) for word in text.strip().split(",") if word]

    def test_golden_cases_and_back(self):
        cases = json.loads((FIXTURES / "demo-golden" / "tokenizer_golden.json").read_text())
        self.assertGreater(len(cases), 10)
        for case in cases:
            with self.subTest(text=case["text"]):
                path = self.write("text", case["text"])
                ids = self.ids("-f", path, "--special")
                self.assertEqual(ids, case["ids"])
                if ids:
                    back = self.expect_ok("tokenize", DEMO, "--decode", ",".join(map(str, ids)))
                    self.assertEqual(back.out, case["decoded"])

    def test_argument_file_and_standard_input(self):
        text = "To be, or not to be: naïve 日本"
        expected = self.ids(text)
        self.assertGreater(len(expected), 5)
        self.assertEqual(self.ids("-f", self.write("t", text)), expected)
        self.assertEqual(self.ids(stdin=text.encode()), expected)
        self.assertEqual(self.ids(stdin=text.encode() + b"\n"), self.ids(text + "\n"))  # byte for byte

    def test_special_tokens_are_plain_text_unless_asked(self):
        text = "<|im_start|>user"
        plain = self.ids(text)
        self.assertNotIn(3057, plain)
        self.assertEqual(self.expect_ok("tokenize", DEMO, "--decode", ",".join(map(str, plain))).out, text)
        self.assertEqual(self.ids(text, "--special")[0], 3057)

    def test_one_token_per_line_with_its_text(self):
        text = 'a "q"\n\té 日'
        lines = self.expect_ok("tokenize", DEMO, text).out.splitlines()
        self.assertEqual([int(line.split()[0]) for line in lines], self.ids(text))
        self.assertTrue(all(line.rstrip().endswith('"') for line in lines), lines)
        joined = "".join(line.split(None, 1)[1][1:-1] for line in lines)
        self.assertIn('\\"', joined)
        self.assertIn("\\n", joined)
        self.assertIn("\\xc3", joined)  # é is two byte tokens in this vocabulary

    def test_json(self):
        text = "café To be"
        value = self.expect_ok("tokenize", DEMO, text, "--json").json
        self.assertEqual(value["text"], text)
        self.assertEqual(value["ids"], self.ids(text))
        self.assertEqual(value["n_tokens"], len(value["ids"]))
        self.assertEqual([token["id"] for token in value["tokens"]], value["ids"])
        pieces = b"".join(bytes.fromhex(t["hex"]) if "hex" in t else t["text"].encode() for t in value["tokens"])
        self.assertEqual(pieces.decode(), text)
        back = self.expect_ok("tokenize", DEMO, "--decode", ",".join(map(str, value["ids"])), "--json").json
        self.assertEqual((back["text"], back["ids"]), (text, value["ids"]))

    def test_text_that_is_no_utf8(self):
        value = self.expect_ok("tokenize", DEMO, "--json", stdin=b"a\xff\xfeb")
        self.assertIn("ids", value.json)

    def test_empty_text_has_no_tokens(self):
        self.assertEqual(self.expect_ok("tokenize", DEMO, "").out, "")
        self.assertEqual(self.expect_ok("tokenize", DEMO, "", "--ids").out, "\n")
        self.assertEqual(self.expect_ok("tokenize", DEMO, "--json").json["ids"], [])

    def test_errors(self):
        self.expect_error(["tokenize", DEMO, "--decode", "1,99999"], "99999", "out of range")
        self.expect_error(["tokenize", DEMO, "--decode", "-1"], "-1", "out of range")
        self.expect_error(["tokenize", DEMO, "--decode", "99999999999"], "99999999999", "out of range")
        self.expect_error(["tokenize", DEMO, "--decode", "1,x2"], "x2")
        self.expect_error(["tokenize", DEMO, "--decode", "1;2"], "1;2")
        self.expect_error(["tokenize", DEMO, "--decode", ","], "no token ids")
        self.expect_error(["tokenize", DEMO, "text", "--decode", "1"], "--decode")
        self.expect_error(["tokenize", DEMO, "-f", self.dir / "absent"], "absent")
        self.expect_error(["tokenize", self.dir / "nowhere", "x"], "nowhere")
        self.expect_error(["tokenize", self.dir, "x"], "tokenizer.json")

    def test_only_the_tokenizer_is_read(self):
        self.write("m/tokenizer.json", (DEMO / "tokenizer.json").read_bytes())
        self.assertEqual(self.expect_ok("tokenize", self.dir / "m", "To be", "--ids").out,
                         self.expect_ok("tokenize", DEMO, "To be", "--ids").out)


if __name__ == "__main__":
    main()
