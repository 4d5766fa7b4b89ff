"""inspect: what a folder holds, and what it lacks."""

import json
import struct

from support import DEMO, FIXTURES, CliTest, main


def drop_tensors(path, unwanted):
    """Removes tensors from a safetensors file's header and bytes; returns the names."""
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8:8 + n]), data[8 + n:]
    dropped, kept, out = [], {}, b""
    for name, entry in header.items():
        if name != "__metadata__" and unwanted(name):
            dropped.append(name)
        elif name != "__metadata__":
            begin, end = entry["data_offsets"]
            kept[name] = {**entry, "data_offsets": [len(out), len(out) + end - begin]}
            out += body[begin:end]
    text = json.dumps(kept).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + out)
    return dropped


class Inspect(CliTest):
    def test_demo(self):
        value = self.expect_ok("inspect", DEMO, "--json").json
        expected = {"model_type": "qwen3_5_moe", "n_layers": 8, "n_moe_layers": 8, "hidden_dim": 256, "vocab_size": 3072,
                    "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "n_experts": 32, "top_k": 4, "expert_dim": 64,
                    "shared_dim": 128, "max_context": 8192, "missing": []}
        self.assertEqual({key: value[key] for key in expected}, expected)
        self.assertEqual(len(value["mixers"]), 8)
        self.assertEqual(len(set(value["mixers"])), 2)
        self.assertTrue(value["tokenizer"])
        self.assertEqual(value["expert_bytes"], sum(value["expert_formats"].values()))
        self.assertEqual(value["trunk_bytes"], sum(value["trunk_formats"].values()))
        # 4 bits, and a scale and a bias of 16 bits for each 64: 4.5 bits per weight, three matrices.
        self.assertEqual(value["expert_bytes"], 8 * 32 * 3 * 256 * 64 * 9 // 16)
        for key in ("bytes_per_expert", "active_expert_bytes_per_token", "kv_bytes_per_token_f16", "state_bytes"):
            self.assertIsInstance(value[key], int)
            self.assertGreater(value[key], 0, key)

    def test_table(self):
        text = self.expect_ok("inspect", DEMO).out
        for fragment in ("qwen3_5_moe", "8 (", "delta-net", "attention", "32 per layer, 4 used", "vocabulary 3072",
                         "tokenizer", "nothing"):
            self.assertIn(fragment, text)

    def test_model_without_tokenizer(self):
        value = self.expect_ok("inspect", FIXTURES / "qwen3_5_moe-bf16", "--json").json
        self.assertIsNone(value["tokenizer"])
        self.assertIn("tokenizer.json", " ".join(value["missing"]))

    def test_missing_tensors_are_told_not_failed(self):
        model = self.copy_model(FIXTURES / "qwen3_5_moe-mlx4")
        dropped = drop_tensors(model / "model.safetensors", lambda name: "layers.1." in name and "q_proj" in name
                               or "layers.0." in name and "norm" in name)
        self.assertTrue(dropped)
        value = self.expect_ok("inspect", model, "--json").json
        self.assertTrue([name for name in value["missing"] if "tokenizer" not in name])
        text = self.expect_ok("inspect", model).out
        self.assertRegex(text, r"missing +missing \d+ tensors or files: ")
        self.assertIn(value["missing"][0], text)
        self.expect_error(["logits", model, "--tokens", "1", "--out", self.dir / "l"], "missing", "layers.0.")

    def test_errors(self):
        self.expect_error(["inspect", self.dir / "nowhere"], "nowhere")
        self.expect_error(["inspect", self.dir], "config.json")


if __name__ == "__main__":
    main()
