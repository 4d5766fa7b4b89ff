#!/usr/bin/env python3
"""Runs `moeflux bench` and a second program in turn and prints medians, spread and ratios.

    compare.py [-n STARTS] [-p 512] [-d 64] MOEFLUX MODEL -- OTHER COMMAND ..

MOEFLUX is a moeflux binary, MODEL its model. The other command is run as it stands; it may be a second moeflux
(`.. bench MODEL --json`) or llama-bench (`-d 0,512 -o json`): whichever JSON it prints is understood. Each side is started at least
five times, one after the other, because a machine that others use drifts: only what was measured side by side compares.
The spread is the distance between the smallest and the largest value, in per cent of the median.
"""

import argparse
import json
import statistics
import subprocess
import sys


def run(command):
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"compare: {' '.join(command)} failed ({result.returncode}):\n{result.stderr.strip()[-2000:]}")
    return result.stdout


def first_json(text):
    """The first JSON value in the text, whatever stands around it."""
    for at, char in enumerate(text):
        if char in "[{":
            try:
                return json.JSONDecoder().raw_decode(text[at:])[0]
            except json.JSONDecodeError:
                continue
    sys.exit(f"compare: no JSON in:\n{text[:500]}")


def rates(value):
    """{"prefill": tok/s, "decode": tok/s, ..} from the JSON of `moeflux bench` or of llama-bench.

    Of llama-bench the prompt counts that starts from nothing, and the tokens behind the longest prompt (-d 0,512)."""
    if isinstance(value, dict):
        parts = {phase: value.get(f"{phase}_tokens_per_second") for phase in ("prefill", "decode")}
        found = {phase: float(part["median"]) for phase, part in parts.items() if part and part["median"]}
        for name in ("weights_share", "memory_share"):
            if value.get(name):
                found[name] = value[name]
        return found
    found, deepest = {}, -1
    for test in value:
        n_prompt, n_gen, depth, rate = test.get("n_prompt", 0), test.get("n_gen", 0), test.get("n_depth", 0), test.get("avg_ts")
        if n_prompt and not n_gen and depth == 0:
            found["prefill"] = rate
        elif n_gen and not n_prompt and depth > deepest:
            found["decode"], deepest = rate, depth
    return found


def text(values):
    median = statistics.median(values)
    return f"{median:9.2f} tok/s  spread {100 * (max(values) - min(values)) / median:4.1f} %  ({len(values)} starts)"


def main():
    if "--" not in sys.argv:
        sys.exit(__doc__)
    split = sys.argv.index("--")
    parser = argparse.ArgumentParser(usage="compare.py [-n STARTS] [-p PROMPT] [-d DECODE] MOEFLUX MODEL -- OTHER COMMAND ..")
    parser.add_argument("moeflux")
    parser.add_argument("model")
    parser.add_argument("-n", "--starts", type=int, default=5)
    parser.add_argument("-p", "--prompt", type=int, default=512)
    parser.add_argument("-d", "--decode", type=int, default=64)
    args = parser.parse_args(sys.argv[1:split])
    other = sys.argv[split + 1:]
    if not other:
        sys.exit(__doc__)
    if args.starts < 5:
        print("compare: fewer than 5 starts a side say little", file=sys.stderr)
    ours = [args.moeflux, "bench", args.model, "-p", str(args.prompt), "-n", str(args.decode), "-r", "1", "--json"]

    sides = {"moeflux": {}, "other": {}}
    for start in range(args.starts):
        # Who goes first changes, so that a drift favours neither.
        order = [("moeflux", ours), ("other", other)]
        for name, command in order if start % 2 == 0 else reversed(order):
            for phase, rate in rates(first_json(run(command))).items():
                sides[name].setdefault(phase, []).append(rate)
        pair = ", ".join(f"{phase} {sides['moeflux'][phase][-1]:.1f} : {sides['other'][phase][-1]:.1f}"
                         for phase in ("prefill", "decode") if sides["moeflux"].get(phase) and sides["other"].get(phase))
        print(f"pair {start + 1} of {args.starts}: {pair}", flush=True)

    for phase in ("prefill", "decode"):
        a, b = sides["moeflux"].get(phase), sides["other"].get(phase)
        for name, values in (("moeflux", a), ("other", b)):
            if values:
                print(f"{phase:8} {name:8} {text(values)}")
        if a and b:
            pairs = [x / y for x, y in zip(a, b)]
            print(f"{phase:8} ratio    {statistics.median(pairs):9.3f}        from {min(pairs):.3f} to {max(pairs):.3f}, start by start")
    for name, what in (("weights_share", "of what the same threads read from the weights around each decode"),
                       ("memory_share", "of what they read from other memory afterwards")):
        shares = sides["moeflux"].get(name)
        if shares:
            print(f"decode   moeflux  {100 * statistics.median(shares):.1f} % {what} ({', '.join(f'{100 * x:.0f}' for x in shares)})")



if __name__ == "__main__":
    main()
