"""simulate: hit rates of a recorded run."""

from support import CliTest, main


def cycle(n_steps):
    """Two layers that always want the same two experts of four."""
    return '{"model": "toy", "n_experts": 4}\n' + '{"phase":"decode","layers":[[0,1],[2,3]]}\n' * n_steps


class Simulate(CliTest):
    def setUp(self):
        super().setUp()
        self.trace = self.dir / "t.jsonl"
        self.trace.write_text(cycle(10))

    def test_json(self):
        value = self.expect_ok("simulate", self.trace, "--cache", "25%,0.5", "--json").json
        self.assertEqual(value["model"], "toy")
        self.assertEqual([value[k] for k in ("n_layers", "n_experts", "n_steps", "n_requests")], [2, 4, 10, 40])
        small, large = value["rows"]
        self.assertEqual((small["cache"], small["n_slots"], small["lru"]), (0.25, 2, 0))
        self.assertGreater(small["belady"], 0)
        self.assertEqual(large, {"cache": 0.5, "n_slots": 4, "ours": 0.9, "lru": 0.9, "belady": 0.9})

    def test_table_and_the_shares_by_default(self):
        self.trace.write_text(cycle(10).replace("4}", "40}"))
        text = self.expect_ok("simulate", self.trace).out
        for word in ("toy", "ours", "LRU", "Belady", "5 %", "10 %", "25 %", "50 %"):
            self.assertIn(word, text)

    def test_errors(self):
        self.expect_error(["simulate"], "TRACE")
        self.expect_error(["simulate", self.dir / "none"], "none", "no such file")
        self.expect_error(["simulate", self.trace, "--cache", "much"], "much")
        self.expect_error(["simulate", self.trace, "--cache", "5%,"], "--cache")
        self.expect_error(["simulate", self.trace, "--cache", "0"], "cache of 0")
        self.expect_error(["simulate", self.trace, "--cache", "150%"], "cache of 1.5")
        self.expect_error(["simulate", self.trace, "--cache", "nan"], "cache of nan")
        self.trace.write_text(cycle(1) + "oops\n")
        self.expect_error(["simulate", self.trace], "t.jsonl:3")


if __name__ == "__main__":
    main()
