"""inspect of every published shape at full size: parameters, bytes and caches are what its dimensions say.

Expected values were computed from the published dimensions apart from this code: parameters in billions, memory in GB of
1e9 bytes, cache in KiB, state in MiB, each as rounded there. All weights are taken at 4.5 bits (4-bit codes, a 16-bit
scale and bias for each 64); routers and norms, which published files keep wider, are accounted for by format.
"""

from support import CliTest, main

# name, one expert's bytes, all experts GB, experts GB/token, trunk params B, trunk GB, KV KiB/token f16, state MiB,
# all params B, active params B
SHAPES = [
    ("Qwen3.5-397B-A17B", 7077888, 217.4, 4.25, 9.80, 5.51, 30.0, 186.3, 396.3, 16.3),
    ("Qwen3.5-122B-A10B", 5308416, 65.2, 2.04, 6.15, 3.46, 24.0, 149.1, 122.1, 9.0),
    ("Qwen3.5-35B-A3B", 1769472, 18.1, 0.57, 2.45, 1.38, 20.0, 62.8, 34.7, 2.9),
    ("Qwen3-Next-80B-A3B", 1769472, 43.5, 0.85, 2.36, 1.33, 24.0, 75.4, 79.7, 3.6),
    ("Qwen3-30B-A3B", 2654208, 16.3, 1.02, 1.54, 0.87, 96.0, 0, 30.5, 3.0),
    ("Qwen3-235B-A22B", 10616832, 127.7, 7.98, 8.00, 4.50, 188.0, 0, 235.1, 21.6),
    ("Qwen3-Coder-480B-A35B", 26542080, 263.3, 13.16, 12.07, 6.79, 248.0, 0, 480.2, 34.5),
    ("DeepSeek-V3", 24772608, 367.8, 11.49, 17.12, 9.63, 68.6, 0, 671.0, 36.6),
    ("Cogito-V2-671B", 24772608, 367.8, 11.49, 17.11, 9.62, 68.6, 0, 671.0, 36.6),
    ("Kimi-K2", 24772608, 570.8, 11.89, 11.72, 6.59, 68.6, 0, 1026.4, 31.7),
    ("Kimi-K2.5", 24772608, 570.8, 11.89, 11.72, 6.59, 68.6, 0, 1026.4, 31.7),
    ("GLM-4.6", 13271040, 189.0, 9.45, 16.83, 9.47, 368.0, 0, 352.8, 32.9),
    ("GLM-4.5-Air", 9732096, 56.1, 3.50, 7.20, 4.05, 184.0, 0, 106.9, 12.8),
    # Experts in MXFP4: 17 bytes for 32 weights, and f32 biases of 3 * 2880.
    ("gpt-oss-20b", 13219200 + 34560, 10.2, 1.27, 1.80, 1.01, 48.0, 0, 20.9, 3.6),
    ("gpt-oss-120b", 13219200 + 34560, 61.1, 1.91, 2.13, 1.20, 72.0, 0, 116.8, 5.1),
    ("MiniMax-M2", 7962624, 126.4, 3.95, 4.01, 2.26, 248.0, 0, 228.7, 10.4),
    ("Mixtral-8x7B", 99090432, 25.4, 6.34, 1.61, 0.90, 128.0, 0, 46.7, 12.7),
    ("OLMoE-1B-7B", 3538944, 3.6, 0.45, 0.48, 0.27, 128.0, 0, 6.9, 1.2),
    ("DeepSeek-V2-Lite", 4866048, 8.1, 0.76, 1.31, 0.74, 30.4, 0, 15.7, 2.5),
]

BYTES_PER_PARAM = {"affine 4-bit g64": 4.5 / 8, "affine 8-bit g64": 8.5 / 8, "bf16": 2, "f32": 4}


class Shapes(CliTest):
    def rounded(self, value, expected, digits, what):
        """As printed with so many digits."""
        self.assertAlmostEqual(value, expected, delta=0.5000001 * 10**-digits, msg=what)

    def test_every_shape_is_here(self):
        shapes = self.expect_ok("synth", "--list", "--json").json["shapes"]
        self.assertEqual({s["name"] for s in shapes} - {"tiny"}, {row[0] for row in SHAPES})

    def test_inspect_agrees(self):
        for name, expert, experts, active, trunk_params, trunk, kv, state, params, active_params in SHAPES:
            with self.subTest(name):
                folder = self.dir / name
                made = self.expect_ok("synth", "--shape", name, "--headers-only", "--out", folder, "--json").json
                self.assertTrue(made["headers_only"])
                info = self.expect_ok("inspect", folder, "--json").json
                self.assertEqual((info["missing"], info["warnings"]), ([], []))
                self.assertEqual(info["bytes_per_expert"], expert)
                self.assertEqual(info["expert_bytes"], expert * info["n_experts"] * info["n_moe_layers"])
                self.assertEqual(info["active_expert_bytes_per_token"], expert * info["top_k"] * info["n_moe_layers"])
                self.rounded(info["expert_bytes"] / 1e9, experts, 1, "all experts")
                self.rounded(info["active_expert_bytes_per_token"] / 1e9, active, 2, "experts per token")
                self.rounded(info["n_trunk_params"] / 1e9, trunk_params, 2, "trunk parameters")
                self.rounded(info["n_trunk_params"] * 4.5 / 8 / 1e9, trunk, 2, "trunk at 4.5 bits")
                self.assertEqual(info["trunk_bytes"], sum(info["trunk_formats"].values()))
                self.assertEqual(info["n_trunk_params"],
                                 sum(n / BYTES_PER_PARAM[name] for name, n in info["trunk_formats"].items()))
                self.assertLess(info["trunk_bytes"] / 1e9, 1.06 * trunk)  # unquantized routers are the most
                self.rounded(info["kv_bytes_per_token_f16"] / 1024, kv, 1, "cache")
                self.rounded(info["state_bytes"] / 2**20, state, 1, "state")
                self.rounded(info["n_params"] / 1e9, params, 1, "parameters")
                self.rounded(info["n_active_params"] / 1e9, active_params, 1, "active parameters")

    def test_headers_alone_take_no_room(self):
        folder = self.dir / "m"
        made = self.expect_ok("synth", "--shape", "397b", "--headers-only", "--out", folder, "--json").json
        files = list(folder.glob("*.safetensors"))
        self.assertEqual(len(files), made["n_files"])
        self.assertGreater(sum(path.stat().st_size for path in files), made["tensor_bytes"])
        self.assertLess(sum(path.stat().st_blocks for path in files) * 512, 50e6)
        text = self.expect_ok("inspect", folder).out
        for fragment in ("396.3", "16.3", "in the trunk", "7.1 MB", "4.2 GB of experts"):
            self.assertIn(fragment, text)


if __name__ == "__main__":
    main()
