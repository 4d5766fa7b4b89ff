"""Folders that are no models: exit code 2 and a message that names the thing, from every verb that opens one."""

import json
import struct

from support import DEMO, FIXTURES, CliTest, main

TINY = FIXTURES / "qwen3_5_moe-mlx4"


class BadModels(CliTest):
    def refused(self, model, *fragments, code=2, inspect=True):
        """By a verb that loads, and by inspect, which does not."""
        self.expect_error(["logits", model, "--tokens", "1,2", "--out", self.dir / "l"], *fragments, code=code)
        if inspect:
            self.expect_error(["inspect", model], *fragments, code=code)

    def edit_config(self, **changes):
        model = self.copy_model(TINY)
        config = json.loads((model / "config.json").read_text())
        config.update(changes)
        (model / "config.json").write_text(json.dumps(config))
        return model

    def edit_weights(self, change):
        model = self.copy_model(TINY)
        path = model / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))
        return model

    def test_missing_folder(self):
        nowhere = self.dir / "nowhere"
        self.refused(nowhere, nowhere)
        for args in (["run", nowhere, "x"], ["tokenize", nowhere, "x"], ["perplexity", nowhere, "-f", DEMO / "README.md"]):
            self.expect_error(args, nowhere)

    def test_file_in_place_of_a_folder(self):
        path = self.write("file", "x")
        self.refused(path, path)

    def test_no_config(self):
        model = self.copy_model(TINY)
        (model / "config.json").unlink()
        self.refused(model, "config.json")

    def test_broken_config(self):
        model = self.copy_model(TINY)
        (model / "config.json").write_text('{"model_type": ')
        self.refused(model, "config.json")

    def test_unknown_model_type(self):
        self.refused(self.edit_config(model_type="hal_9000"), "hal_9000")

    def test_no_weights(self):
        model = self.copy_model(TINY)
        (model / "model.safetensors").unlink()
        self.refused(model, "safetensors")

    def test_truncated_weights(self):
        self.refused(self.edit_weights(lambda data: data[:len(data) // 2]), "model.safetensors")
        self.refused(self.edit_weights_again(lambda data: data[:5]), "model.safetensors")
        self.refused(self.edit_weights_again(lambda data: b""), "model.safetensors")

    def edit_weights_again(self, change):
        path = self.dir / "model" / "model.safetensors"
        path.write_bytes(change((TINY / "model.safetensors").read_bytes()))
        return path.parent

    def test_header_beyond_the_file_or_the_limit(self):
        self.refused(self.edit_weights(lambda data: struct.pack("<Q", len(data)) + data[8:]), "model.safetensors")
        self.refused(self.edit_weights_again(lambda data: struct.pack("<Q", 1 << 60) + data[8:]), "model.safetensors")

    def test_missing_shard(self):
        model = self.copy_model(TINY)
        data = (model / "model.safetensors").read_bytes()
        (n,) = struct.unpack("<Q", data[:8])
        names = [name for name in json.loads(data[8:8 + n]) if name != "__metadata__"]
        (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
        index = {"weight_map": {name: "model-00001-of-00002.safetensors" for name in names[1:]}}
        index["weight_map"][names[0]] = "model-00002-of-00002.safetensors"
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        self.expect_error(["logits", model, "--tokens", "1", "--out", self.dir / "l"], "model-00002-of-00002.safetensors")

    def test_broken_tokenizer(self):
        model = self.copy_model(DEMO)
        text = (model / "tokenizer.json").read_text()
        for broken in (text[:1000], "[]", '{"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}'):
            (model / "tokenizer.json").write_text(broken)
            self.expect_error(["tokenize", model, "x"], "tokenizer.json")
            self.expect_error(["run", model, "x"], "tokenizer.json")


if __name__ == "__main__":
    main()
