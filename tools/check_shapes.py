#!/usr/bin/env python3
"""Makes a model of every published shape with few layers and runs it: does it load, decode and stay within memory?

    tools/check_shapes.py build/release/bin/moeflux --work DIR [--ram 8GiB] [--layers N] [--experts N] [--shape NAME ..]

For each shape of `moeflux synth --list`: random weights in the fewest layers that hold every kind of layer (all experts
unless --experts), `inspect`, a short prompt, the same tokens one by one. It must give finite logits of a plausible size,
the same bytes both ways, and a peak of memory below --ram. One row of a table each; the model is deleted at once.
"""

import argparse
import array
import json
import math
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import time

def run(*args):
    """Standard output as JSON, the peak of the process's memory in bytes, seconds."""
    start = time.monotonic()
    process = subprocess.Popen([str(a) for a in args], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process.stdout, process.stderr:
        out, err = process.stdout.read(), process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, args))}: {err.decode(errors='replace').strip()}")
    return json.loads(out), usage.ru_maxrss * 1024, time.monotonic() - start


def logits_of(path):
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    begin, end = json.loads(data[8:8 + n])["logits"]["data_offsets"]
    return array.array("f", data[8 + n + begin:8 + n + end])


def deviation(values):
    total = math.fsum(v * v for v in values)
    return math.sqrt(total / len(values)) if math.isfinite(total) else math.nan


def size_of(text):
    for unit, factor in (("GiB", 1 << 30), ("GB", 10**9), ("MiB", 1 << 20), ("MB", 10**6)):
        if text.endswith(unit):
            return float(text[:-len(unit)]) * factor
    return float(text)


def check(options, shape):
    folder, out = options.work / "model", options.work / "logits.safetensors"
    cut = ["--layers", options.layers or max(2, shape["few_layers"])] + (["--experts", options.experts] if options.experts else [])
    try:
        made, _, _ = run(options.moeflux, "synth", "--shape", shape["name"], "--out", folder, "--json", *cut)
        info, _, _ = run(options.moeflux, "inspect", folder, "--json")
        if info["missing"] or info["warnings"]:
            raise RuntimeError(f"inspect: {info['missing'] + info['warnings']}")
        tokens = ",".join(str((i * 7919 + 13) % info["vocab_size"]) for i in range(12))
        command = [options.moeflux, "logits", folder, "--tokens", tokens, "--out", out, "--ram", options.ram, "--json"]
        prefill, peak, _ = run(*command)
        decode, other_peak, seconds = run(*command, "--decode")
        rms = deviation(logits_of(out))
        peak = max(peak, other_peak)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        out.unlink(missing_ok=True)
    faults = []
    if prefill["logits_hash"] != decode["logits_hash"]:
        faults.append("prompt and single tokens differ")
    if not 1 < rms < 6:  # made to have 2.5; a NaN fails
        faults.append(f"logits of size {rms}")
    if peak > size_of(options.ram):
        faults.append("over the memory ceiling")
    row = (shape["name"], made["n_layers"], made["n_experts"], f"{made['tensor_bytes'] / 1e9:.1f}", f"{info['bytes_per_expert']:,}",
           f"{peak / 2**30:.2f}", f"{seconds:.1f}", f"{decode['stats']['bytes_read'] / 1e9:.1f}", f"{rms:.2f}",
           "; ".join(faults) or "ok")
    return row, not faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("moeflux", type=pathlib.Path)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for one model at a time (up to 17 GB)")
    parser.add_argument("--ram", default="8GiB")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--shape", dest="shapes", action="append", help="only this one; may be repeated")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)

    shapes, _, _ = run(options.moeflux, "synth", "--list", "--json")
    chosen = [s for s in shapes["shapes"] if not options.shapes or s["name"] in options.shapes]
    layout = "{:<22} {:>6} {:>7} {:>7} {:>12} {:>9} {:>8} {:>8} {:>6}  {}"
    print(layout.format("shape", "layers", "experts", "disk GB", "expert B", "peak GiB", "decode s", "read GB", "logits", ""))
    good = True
    for shape in chosen:
        try:
            row, ok = check(options, shape)
        except RuntimeError as error:
            row, ok = (shape["name"],) + ("-",) * 8 + (str(error),), False
        good = good and ok
        print(layout.format(*row), flush=True)
    return 0 if good and chosen else 1


if __name__ == "__main__":
    sys.exit(main())
