"""bench: rates, bytes and the hash."""

from support import DEMO, CliTest, main


class Bench(CliTest):
    def bench(self, *more, threads=1):
        return self.expect_ok("bench", DEMO, "-p", 24, "-n", 6, "-r", 3, "-t", threads, "--json", *more).json

    def test_json(self):
        value = self.bench()
        self.assertEqual((value["n_prompt"], value["n_decode"], value["n_repeat"]), (24, 6, 3))
        for key in ("prefill_tokens_per_second", "decode_tokens_per_second"):
            series = value[key]
            self.assertEqual(len(series["runs"]), 3)
            self.assertEqual([series["min"], series["median"], series["max"]], sorted(series["runs"]))
            self.assertGreater(series["min"], 0)
        self.assertEqual(value["hit_rate"], 1.0)
        self.assertEqual(value["bytes_read_per_token"], 0)
        self.assertGreaterEqual(value["stall_seconds"], 0)
        self.assertGreater(value["compute_seconds"], 0)
        self.assertGreater(value["memory_peak_bytes_per_second"], 1e8)
        self.assertGreater(value["memory_share"], 0)

    def test_bytes_of_a_token(self):
        info = self.expect_ok("inspect", DEMO, "--json").json
        token = self.bench("--kv", "f16")["token_bytes"]
        self.assertEqual(token["trunk"], info["trunk_bytes_per_token"])
        # All but the embedding table, of which one row of 256 weights is read: 4.5 bits each.
        self.assertEqual(info["trunk_bytes"] - info["trunk_bytes_per_token"], 3071 * 256 * 9 // 16)
        self.assertEqual(token["experts"], info["active_expert_bytes_per_token"])
        self.assertEqual(token["kv"], info["kv_bytes_per_token_f16"] * 27)
        self.assertEqual(token["state"], info["state_bytes"])
        self.assertEqual(token["total"], sum(token[key] for key in ("trunk", "experts", "kv", "state")))
        self.assertEqual(self.bench()["token_bytes"]["kv"], 2 * token["kv"])

    def test_peak_memory_is_the_models_not_the_probes(self):
        peak = self.bench()["peak_rss_bytes"]
        info = self.expect_ok("inspect", DEMO, "--json").json
        self.assertGreater(peak, info["trunk_bytes"] + info["expert_bytes"])
        if peak > 400e6:  # a sanitizer's own memory
            self.skipTest("this build uses much memory itself")
        self.assertLess(peak, 300e6)

    def test_hash(self):
        one = self.bench()["logits_hash"]
        self.assertRegex(one, r"^[0-9a-f]{16}$")
        self.assertEqual(self.bench("--chunk", 5, threads=2)["logits_hash"], one)
        self.assertNotEqual(self.bench("--seed", 1)["logits_hash"], one)

    def test_parts(self):
        value = self.expect_ok("bench", DEMO, "-p", 0, "-n", 3, "-r", 1, "--json").json
        self.assertEqual(value["prefill_tokens_per_second"]["runs"], [])
        self.assertEqual(len(value["decode_tokens_per_second"]["runs"]), 1)
        value = self.expect_ok("bench", DEMO, "-p", 3, "-n", 0, "-r", 2, "--json").json
        self.assertEqual(value["decode_tokens_per_second"]["runs"], [])

    def test_table(self):
        text = self.expect_ok("bench", DEMO, "-p", 8, "-n", 2, "-r", 2).out
        for word in ("prefill", "decode", "hit rate", "one token", "memory", "peak", "logits"):
            self.assertIn(word, text)

    def test_errors(self):
        self.expect_error(["bench", DEMO, "-p", 0, "-n", 0], "nothing to measure")
        self.expect_error(["bench", DEMO, "-r", 0], "-r")
        self.expect_error(["bench", DEMO, "-p", 9000], "8192")
        self.expect_error(["bench", self.dir / "none"], "none")


if __name__ == "__main__":
    main()
