#!/usr/bin/env python3
"""Tiny random models with expected outputs, for what the plain fixtures do not cover.

Usage: make_more.py OUT [CASE ..]

OUT is a folder, or a name that ends in .tar.gz: then the folders come as one archive. Every case becomes
OUT/<family>-<case>/ with config.json, model.safetensors and golden.safetensors as tests/engine/golden_test.cpp
reads them. Needs torch, safetensors and transformers 5.17; runs on the CPU in float32 with eager attention.
`--self-check` runs what needs no transformers.

Expected values come from transformers with exactly the numbers that the stored weights stand for: a model is
saved in the published layout, its matrices are quantized and decoded again, the decoded model is loaded back
and run, and the codes are what is written.
"""

import argparse
import json
import math
import pathlib
import shutil
import sys
import tarfile
import tempfile
import time
import traceback

import torch
from safetensors.torch import load_file, save_file

T_PROMPT, T_GREEDY = 48, 24


# ---- weights


def fill(model, seed):
    """Random numbers of a size at which every parameter matters; norms around what the fresh model has."""
    generator = torch.Generator().manual_seed(seed)
    buffers = [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    oss = "gpt_oss" in type(model).__module__
    with torch.no_grad():
        for name, p in list(model.named_parameters()) + buffers:
            noise = torch.randn(p.shape, generator=generator)
            if "norm" in name.rsplit(".", 2)[-2] or name.endswith("norm.weight"):
                value = p.float().mean().round() + 0.2 * noise
            elif name.endswith("e_score_correction_bias"):
                value = 0.3 * noise - 0.5
            elif name.endswith("sinks") or "embed_tokens" in name:
                value = noise
            elif p.dim() < 2 or name.endswith("bias"):
                value = 0.1 * noise
            else:
                inputs = p.shape[-2] if oss and "experts" in name else p.shape[-1]
                gain = 4.0 if oss and name.endswith("gate_up_proj") else 1.3  # large enough to meet the clamp
                value = noise * (gain / math.sqrt(inputs))
            p.copy_(value.to(torch.bfloat16).float())


def fresh_model(kind, settings, seed):
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind](**settings)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    fill(model, seed)
    return model


def load_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).float().eval()


# ---- formats: each gives the stored tensors and the f32 numbers they stand for


def affine4(w, group=64):
    """4-bit codes with a bf16 scale and bias per group."""
    g = w.float().reshape(*w.shape[:-1], -1, group)
    high, low = g.amax(-1, keepdim=True), g.amin(-1, keepdim=True)
    low_side = low.abs() > high.abs()
    scale = ((high - low) / 15).clamp_min(1e-7)
    scale = torch.where(low_side, scale, -scale)
    edge = torch.where(low_side, low, high)
    at_edge = torch.round(edge / scale)
    scale = torch.where(at_edge != 0, edge / torch.where(at_edge == 0, torch.ones_like(edge), at_edge), scale)
    bias = torch.where(at_edge != 0, edge, torch.zeros_like(edge))
    scale, bias = scale.bfloat16().float(), bias.bfloat16().float()
    codes = torch.round((g - bias) / scale).clamp(0, 15)
    decoded = (codes * scale + bias).reshape(w.shape)
    nibbles = codes.to(torch.int64).reshape(*w.shape[:-1], -1, 8)
    words = (nibbles << (4 * torch.arange(8))).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).view(torch.uint32)
    return {"weight": words, "scales": scale.squeeze(-1).bfloat16(), "biases": bias.squeeze(-1).bfloat16()}, decoded


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4(w):
    """[.., n] -> blocks [.., n / 32, 16] and scales [.., n / 32]."""
    g = w.float().reshape(*w.shape[:-1], -1, 32)
    top = g.abs().amax(-1, keepdim=True).clamp_min(2.0**-120)
    exponent = torch.round(torch.log2(top / 6)).clamp(-127, 127)
    scale = torch.exp2(exponent)
    codes = ((g / scale)[..., None] - E2M1).abs().argmin(-1)
    decoded = (E2M1[codes] * scale).reshape(w.shape)
    pairs = codes.reshape(*codes.shape[:-1], 16, 2)
    blocks = (pairs[..., 0] | (pairs[..., 1] << 4)).to(torch.uint8)
    return {"blocks": blocks, "scales": (exponent.squeeze(-1) + 127).to(torch.uint8)}, decoded


def fp8_blocks(w, size=128):
    """e4m3 codes with one f32 factor per block of 128 x 128; blocks at the edges are cut."""
    rows, cols = w.shape
    scales = torch.empty(-(-rows // size), -(-cols // size))
    codes = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            part = (slice(r * size, (r + 1) * size), slice(c * size, (c + 1) * size))
            scales[r, c] = w[part].abs().max() / 448
            codes[part] = (w[part] / scales[r, c]).to(torch.float8_e4m3fn)
    spread = scales.repeat_interleave(size, 0)[:rows].repeat_interleave(size, 1)[:, :cols]
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread


# ---- expected values


@torch.no_grad()
def golden(model, vocab, seed, path, n_prompt, n_greedy, keep):
    """tokens, greedy continuation and margins; logits and hidden states of the last `keep` positions."""
    ids = torch.randint(0, vocab, (1, n_prompt), generator=torch.Generator().manual_seed(seed + 77))
    out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    tensors = {"tokens": ids[0].int(), "logits": out.logits[0, -keep:].float()}
    for i, h in enumerate(out.hidden_states):
        tensors[f"hidden.{i}"] = h[0, -keep:].float()
    margins = []
    for _ in range(n_greedy):
        best = model(input_ids=ids, use_cache=False).logits[0, -1].float().topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        ids = torch.cat([ids, best.indices[:1][None]], 1)
    tensors["greedy"] = ids[0, n_prompt:].int()
    tensors["greedy_margin"] = torch.tensor(margins)
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, path)
    return float(tensors["logits"].std())


# ---- cases: settings of the model, and how its tensors are stored


def base(**more):
    settings = dict(vocab_size=256, hidden_size=64, max_position_embeddings=8192, rms_norm_eps=3e-3, tie_word_embeddings=False,
                    num_hidden_layers=2, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    settings.update(more)
    return settings


def plain_rope(theta):
    return dict(rope_type="default", rope_theta=theta)


def deepseek(**more):
    yarn = dict(rope_type="yarn", rope_theta=10000.0, factor=40.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
                original_max_position_embeddings=4096)
    settings = base(num_attention_heads=4, num_key_value_heads=4, intermediate_size=96, moe_intermediate_size=32, n_shared_experts=1,
                    n_routed_experts=8, num_experts_per_tok=3, routed_scaling_factor=2.5, kv_lora_rank=32, q_lora_rank=48,
                    qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=20, n_group=2, topk_group=1, first_k_dense_replace=1,
                    norm_topk_prob=True, rope_parameters=yarn)
    settings.update(more)
    return settings


def qwen3(**more):
    settings = base(num_attention_heads=4, num_key_value_heads=2, head_dim=24, intermediate_size=96, moe_intermediate_size=32,
                    num_experts=8, num_experts_per_tok=3, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
                    rope_parameters=plain_rope(1e6))
    settings.update(more)
    return settings


def oss(**more):
    yarn = dict(rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                original_max_position_embeddings=4096)
    settings = base(num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=96, num_local_experts=6,
                    num_experts_per_tok=3, sliding_window=16, rope_parameters=yarn)
    settings.update(more)
    return settings


def is_matrix(name, t):
    return t.dim() == 2 and name.endswith(".weight")


def store_plain(tensors, _config):
    """As saved, in bf16. Nothing is decoded differently."""
    return {n: t.bfloat16() for n, t in tensors.items()}, tensors, "pt"


def store_fp8(tensors, config):
    stored, decoded = {}, {}
    for name, t in tensors.items():
        kept = "embed_tokens" in name or "lm_head" in name or name.endswith("mlp.gate.weight")
        if not is_matrix(name, t) or kept:
            stored[name], decoded[name] = t.bfloat16(), t
            continue
        parts, decoded[name] = fp8_blocks(t)
        for part, value in parts.items():
            stored[name[: -len("weight")] + part] = value
    config["quantization_config"] = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
    return stored, decoded, "pt"


def store_mxfp4(tensors, config):
    stored, decoded = {}, {}
    for name, t in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name], decoded[name] = t.bfloat16(), t
            continue
        parts, back = mxfp4(t.transpose(1, 2).contiguous())  # saved with inputs first, published with outputs first
        decoded[name] = back.transpose(1, 2).contiguous()
        for part, value in parts.items():
            stored[f"{name}_{part}"] = value
    config["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])
    return stored, decoded, "pt"


def store_latent_pair(tensors, config):
    """MLX names: embed_q and unembed_out instead of kv_b, stacked experts, everything in 4 bits but the router."""
    heads, dn, dv = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
    rank, n_experts = config["kv_lora_rank"], config["n_routed_experts"]
    stored, decoded = {}, {}

    def put(module, w):
        parts, back = affine4(w)
        for part, value in parts.items():
            stored[f"{module}.{part}"] = value
        return back

    for name, t in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            attention = name[: -len("kv_b_proj.weight")]
            both = t.reshape(heads, dn + dv, rank)
            keys = put(attention + "embed_q", both[:, :dn].transpose(1, 2).contiguous())
            values = put(attention + "unembed_out", both[:, dn:].contiguous())
            decoded[name] = torch.cat([keys.transpose(1, 2), values], 1).reshape(t.shape).contiguous()
        elif ".experts." in name:
            start, rest = name.split(".experts.")
            expert, part = rest.split(".", 1)
            if expert != "0":
                continue  # with the first one
            names = [f"{start}.experts.{e}.{part}" for e in range(n_experts)]
            back = put(f"{start}.switch_mlp.{part[: -len('.weight')]}", torch.stack([tensors[n] for n in names]))
            for n, value in zip(names, back):
                decoded[n] = value.contiguous()
        elif is_matrix(name, t) and not name.endswith("mlp.gate.weight"):
            decoded[name] = put(name[: -len(".weight")], t)
        else:
            bias = name.endswith("e_score_correction_bias")
            stored[name], decoded[name] = (t.float() if bias else t.bfloat16()), t
    config["quantization"] = config["quantization_config"] = dict(group_size=64, bits=4, mode="affine")
    return stored, decoded, "mlx"


def store_wrapped(tensors, config):
    """The text model of a model with other inputs: prefixed tensors, nested config."""
    text = dict(config, model_type="kimi_k2")
    config.clear()
    config.update(model_type="kimi_k25", architectures=["KimiK25ForConditionalGeneration"], tie_word_embeddings=False,
                  text_config=text, vision_config=dict(model_type="vision"), media_placeholder_token_id=255)
    stored = {f"language_model.{n}": t.bfloat16() for n, t in tensors.items()}
    stored["vision_tower.patch_embed.weight"] = torch.zeros(2, 2, dtype=torch.bfloat16)
    return stored, tensors, "pt"


KIMI_YARN = dict(rope_type="yarn", rope_theta=50000.0, factor=64.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
                 original_max_position_embeddings=4096)
LONG = dict(n_prompt=4160, n_greedy=4, keep=24)

# name: (model kind, settings, how it is stored, sizes of the golden)
CASES = {
    "deepseek_v3-embed_q": ("deepseek_v3", deepseek(hidden_size=128, moe_intermediate_size=64, intermediate_size=128, kv_lora_rank=64,
                                                   q_lora_rank=64, qk_nope_head_dim=64, v_head_dim=32), store_latent_pair, {}),
    "deepseek_v3-fp8": ("deepseek_v3", deepseek(hidden_size=192, moe_intermediate_size=160, n_routed_experts=4, num_experts_per_tok=2,
                                               intermediate_size=200), store_fp8, {}),
    "deepseek_v3-kimi_k25": ("deepseek_v3", deepseek(n_group=1, topk_group=1, routed_scaling_factor=2.827, rope_parameters=KIMI_YARN),
                             store_wrapped, {}),
    "deepseek_v3-yarn_long": ("deepseek_v3", deepseek(), store_plain, LONG),
    "deepseek_v2-grouped": ("deepseek_v2", deepseek(topk_method="group_limited_greedy", norm_topk_prob=False, n_group=4, topk_group=2,
                                                   routed_scaling_factor=1.7), store_plain, {}),
    "gpt_oss-mxfp4": ("gpt_oss", oss(), store_mxfp4, {}),
    "gpt_oss-yarn_long": ("gpt_oss", oss(), store_plain, LONG),
    "qwen3_moe-tied": ("qwen3_moe", qwen3(tie_word_embeddings=True), store_plain, {}),
    "qwen3_moe-gqa1": ("qwen3_moe", qwen3(num_attention_heads=4, num_key_value_heads=4), store_plain, {}),
    "qwen3_moe-gqa8": ("qwen3_moe", qwen3(num_attention_heads=8, num_key_value_heads=1), store_plain, {}),
    "mixtral-window": ("mixtral", base(num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, num_local_experts=6,
                                       num_experts_per_tok=2, sliding_window=8, rope_parameters=plain_rope(1e6)), store_plain, {}),
    "glm4_moe-no_qk_norm": ("glm4_moe", base(num_attention_heads=4, num_key_value_heads=1, head_dim=24, intermediate_size=96,
                                             moe_intermediate_size=32, n_shared_experts=2, n_routed_experts=6, num_experts_per_tok=3,
                                             routed_scaling_factor=1.0, n_group=1, topk_group=1, first_k_dense_replace=1,
                                             norm_topk_prob=True, use_qk_norm=False, attention_bias=True,
                                             rope_parameters=dict(plain_rope(1e6), partial_rotary_factor=0.5)), store_plain, {}),
    "olmoe-clip": ("olmoe", base(num_attention_heads=4, num_key_value_heads=2, intermediate_size=32, num_experts=8, num_experts_per_tok=3,
                                 norm_topk_prob=False, clip_qkv=0.75, rope_parameters=plain_rope(1e4)), store_plain, {}),
}


def saved_tensors(folder):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return {n: t.float() for n, t in tensors.items()}


def make(name, out):
    kind, settings, store, sizes = CASES[name]
    seed = 5000 + list(CASES).index(name)
    sizes = dict(dict(n_prompt=T_PROMPT, n_greedy=T_GREEDY, keep=T_PROMPT), **sizes)
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        raw, exact = pathlib.Path(scratch) / "raw", pathlib.Path(scratch) / "exact"
        fresh_model(kind, settings, seed).save_pretrained(raw)
        config = json.loads((raw / "config.json").read_text())
        stored, decoded, writer = store(saved_tensors(raw), final := dict(config))
        exact.mkdir()
        (exact / "config.json").write_text(json.dumps(config))
        save_file({n: t.float().contiguous() for n, t in decoded.items()}, exact / "model.safetensors", metadata={"format": "pt"})
        spread = golden(load_model(exact), settings["vocab_size"], seed, folder / "golden.safetensors", **sizes)
    final.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(final, indent=1, sort_keys=True) + "\n")
    save_file({n: t.contiguous().clone() for n, t in stored.items()}, folder / "model.safetensors", metadata={"format": writer})
    size = sum(f.stat().st_size for f in folder.iterdir())
    if size > 1_000_000:
        raise RuntimeError(f"{size} bytes are too much for a fixture")
    return f"{size} bytes, standard deviation of the logits {spread:.3f}"


def self_check():
    """Formats decode to what they were made from, within half a step."""
    w = torch.randn(130, 192, generator=torch.Generator().manual_seed(1))
    for encode, bound in ((affine4, 0.3), (mxfp4, 0.6), (fp8_blocks, 0.2)):
        stored, back = encode(w)
        error = float((back - w).abs().max())
        print(encode.__name__, {k: (v.dtype, tuple(v.shape)) for k, v in stored.items()}, f"max error {error:.3f}")
        assert error < bound


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=pathlib.Path)
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    parser.add_argument("--self-check", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_check:
        return self_check()
    if arguments.out is None or not set(arguments.cases) <= set(CASES):
        parser.error("need OUT and known cases")
    archive = arguments.out if arguments.out.name.endswith(".tar.gz") else None
    out = pathlib.Path(tempfile.mkdtemp()) if archive else arguments.out
    failed = []
    for name in arguments.cases or CASES:
        start = time.time()
        try:
            print(f"{name}: {make(name, out)}, {time.time() - start:.1f} s", flush=True)
        except Exception:
            traceback.print_exc()
            print(f"{name}: FAILED", flush=True)
            shutil.rmtree(out / name, ignore_errors=True)
            failed.append(name)
    if archive:
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive, "w:gz") as tar:
            for folder in sorted(out.iterdir()):
                tar.add(folder, folder.name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
