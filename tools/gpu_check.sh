#!/usr/bin/env bash
# Checks and measures on a machine with a GPU. Usage:
#
#   tools/gpu_check.sh [-b BIN] [-s SCRATCH] [-t TRACE] [NAME..]
#
# NAMEs, each a few minutes at most and able to run alone; all of them by default:
#   tests        the device's op and model tests, tiers and units among them
#   determinism  the demo model's logits: device memory for all, half, a quarter and one token's experts, main memory for the rest or a part,
#                computed by the device or the processor, whole and in chunks, twice; all must be the CPU's
#   sanitize     compute-sanitizer (where it is installed) over op tests and decodes, whole and in tiers
#   bench_ops    matvecs and latent attention alone, where BIN has device_bench (cmake -DMOEFLUX_BENCH=ON)
#   bench_all    the 35b-a3b shape, everything in device memory
#   bench_tiers  the same with a quarter of the experts on the device and the rest in main memory; routing replayed with -t, repeated behind
#                a prompt of 512 tokens (also with the device computing alone), and once as it was recorded
#   bench_disk   the same with main memory for a tenth, a twentieth and a fiftieth of the experts
#   bench_mla    the deepseek-v3 shape in 4 layers, decoding behind a context of 32k
#
# BIN holds moeflux, cuda_test and cuda_engine_test (default: build/release/bin, made by ./dev test). SCRATCH takes synthetic models of
# 20 GB each, which stay for the next run (default: /tmp/moeflux-gpu). TRACE is a routing trace (`moeflux run --trace`) to replay.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." || exit 1
bin=build/release/bin
scratch=/tmp/moeflux-gpu
trace=
while getopts b:s:t: option; do
  case $option in
    b) bin=$OPTARG ;;
    s) scratch=$OPTARG ;;
    t) trace=$OPTARG ;;
    *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))
moeflux="$bin/moeflux"
failed=0

run() {
  printf '\n== %s\n' "$*"
  "$@" || failed=1
}

# field FILE EXPRESSION: a value of a JSON object, given as d.
field() {
  python3 -c 'import json, sys; d = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$1" "$2"
}

# model SHAPE [synth options]: makes it once and prints its folder.
model() {
  local out="$scratch/$1"
  mkdir -p "$scratch"
  [[ -d "$out" ]] || "$moeflux" synth --shape "$1" --out "$out" "${@:2}" >&2 || return 1
  echo "$out"
}

tests() {
  run "$bin/cuda_test" --gtest_brief=1
  run "$bin/cuda_engine_test" --gtest_brief=1
}

determinism() {
  local common=(bench models/demo -p 96 -n 24 -r 2 --no-probe --json) want all fixed experts part percent place ram chunk got
  "$moeflux" "${common[@]}" --backend cpu >"$scratch/cpu.json" || { failed=1; return; }
  want=$(field "$scratch/cpu.json" 'd["logits_hash"]')
  "$moeflux" "${common[@]}" --backend cuda --chunk 64 >"$scratch/all.json" || { failed=1; return; }
  all=$(field "$scratch/all.json" 'd["ram_bytes"]')
  experts=$(field "$scratch/all.json" 'd["expert_bytes"]')
  fixed=$((all - experts))
  # A ceiling of main memory that leaves room for about a third of the experts.
  "$moeflux" "${common[@]}" --backend cuda --chunk 64 --vram $((all - experts / 2)) >"$scratch/half.json" || { failed=1; return; }
  part=$(field "$scratch/half.json" 'd["device"]["ram_least_bytes"] + d["device"]["slot_bytes"] * d["experts"] // 3')
  printf '\n== determinism: the CPU says %s\n%-8s %-8s %-8s %-8s %-18s %s\n' "$want" vram ram by chunk logits ''
  for percent in 100 50 25 5; do
    for place in all:off all:on part:auto; do
      ram=
      [[ $place == part:* ]] && ram=$part
      for chunk in 64 17; do
        if "$moeflux" "${common[@]}" --backend cuda --chunk "$chunk" --vram $((fixed + experts * percent / 100 + (percent == 100 ? 100000000 : 0))) ${ram:+--ram $ram} \
          --cpu-experts "${place#*:}" >"$scratch/one.json" 2>"$scratch/one.err"; then
          got=$(field "$scratch/one.json" 'd["logits_hash"]')
        else
          got=$(tail -1 "$scratch/one.err")
        fi
        printf '%-8s %-8s %-8s %-8s %-18s %s\n' "$percent %" "${place%:*}" "${place#*:}" "$chunk" "$got" "$([[ $got == "$want" ]] && echo same || echo DIFFERENT)"
        [[ $got == "$want" ]] || failed=1
      done
    done
  done
}

# The op tests under a tool of compute-sanitizer, in parts beside each other: one after another they take over ten minutes in racecheck.
sanitize_ops() {
  local tool=$1 n=6 i pids=()
  printf '\n== compute-sanitizer --tool %s over the op tests, in %d parts\n' "$tool" "$n"
  for ((i = 0; i < n; ++i)); do
    GTEST_TOTAL_SHARDS=$n GTEST_SHARD_INDEX=$i compute-sanitizer --tool "$tool" --error-exitcode 1 "$bin/cuda_test" --gtest_brief=1 --gtest_filter='*TwiceInARow*' \
      >"$scratch/sanitize_$i.log" 2>&1 &
    pids+=($!)
  done
  for ((i = 0; i < n; ++i)); do
    if wait "${pids[$i]}"; then
      tail -1 "$scratch/sanitize_$i.log"
    else
      tail -30 "$scratch/sanitize_$i.log"
      failed=1
    fi
  done
}

sanitize() {
  command -v compute-sanitizer >/dev/null || { echo 'compute-sanitizer is not installed: skipped'; return; }
  local tool all experts
  "$moeflux" bench models/demo --backend cuda --chunk 16 -p 40 -n 6 -r 1 --no-probe --json >"$scratch/all.json" || { failed=1; return; }
  all=$(field "$scratch/all.json" 'd["ram_bytes"]')
  experts=$(field "$scratch/all.json" 'd["expert_bytes"]')
  for tool in memcheck racecheck initcheck; do
    sanitize_ops "$tool"
    run compute-sanitizer --tool "$tool" --error-exitcode 1 "$moeflux" bench models/demo --backend cuda -p 40 -n 6 -r 1 --no-probe
    run compute-sanitizer --tool "$tool" --error-exitcode 1 "$moeflux" bench models/demo --backend cuda --chunk 16 --vram $((all - experts / 2)) --cpu-experts on -p 40 -n 6 -r 1 --no-probe
  done
}

# One line of a table: NAME FILE.
row() {
  python3 - "$@" <<'PY'
import json, sys
d = json.load(open(sys.argv[2]))
rate = lambda key: f'{d[key]["median"]:.1f}' if d[key]["runs"] else "-"
line = f'{sys.argv[1]}: prefill {rate("prefill_tokens_per_second")} tok/s, decode {rate("decode_tokens_per_second")} tok/s'
t = d["decode"].get("tiers")
if t:
    n = max(1, t["device_hits"] + t["host_hits"] + t["disk_misses"])
    line += (f'; on the device {100 * t["device_hits"] / n:.1f} %, main memory {100 * t["host_hits"] / n:.1f} %, disk {100 * t["disk_misses"] / n:.1f} %; '
             f'{t["bytes_to_device_per_token"] / 1e6:.0f} MB a token to the device, {t["cpu_experts_per_token"]:.1f} experts by the processor, {t["bytes_to_device_per_second"] / 1e9:.1f} of {d["device"]["link_to_device_bytes_per_second"] / 1e9:.1f} GB/s; '
             f'{100 * t["share_of_bound"]:.0f} % of the bound of {t["bound_tokens_per_second"]:.0f} tok/s, {100 * t["share_of_bound_dependent"]:.0f} % of {t["bound_dependent_tokens_per_second"]:.0f} where copies wait for routers')
print(line, "; logits", d["logits_hash"])
PY
}

# bench NAME MODEL [options]
bench() {
  local name=$1 folder=$2
  shift 2
  printf '\n== %s\n' "$name"
  if "$moeflux" bench "$folder" --backend cuda --json "$@" >"$scratch/$name.json"; then
    row "$name" "$scratch/$name.json"
  else
    failed=1
  fi
}

bench_ops() {
  [[ -x $bin/device_bench ]] || { echo 'device_bench was not built: skipped'; return; }
  run "$bin/device_bench"
}

bench_all() {
  local folder
  folder=$(model 35b-a3b) || { failed=1; return; }
  bench all_decode "$folder" -p 512 -n 128 -r 3 --no-probe
  bench all_prefill "$folder" -p 8192 -n 32 -r 3 --no-probe
}

# What a quarter of the experts beside the rest takes: prints bytes of device memory.
quarter() {
  "$moeflux" bench "$1" --backend cuda -p 512 -n 1 -r 1 --chunk 512 --no-probe --json >"$scratch/quarter.json" || return 1
  field "$scratch/quarter.json" 'int(d["ram_bytes"] - 0.75 * d["expert_bytes"])'
}

# Steps of a trace to take as a prompt (20 where it has none) and to decode, 256 at most.
trace_steps() {
  python3 - "$1" <<'PY'
import json, sys
phases = [s["phase"] for s in map(json.loads, open(sys.argv[1])) if "layers" in s]
prompt = phases.count("prefill") or min(20, len(phases) // 2)
print(prompt, min(256, len(phases) - prompt))
PY
}

bench_tiers() {
  local folder vram replay=()
  folder=$(model 35b-a3b) || { failed=1; return; }
  vram=$(quarter "$folder") || { failed=1; return; }
  [[ -n $trace ]] && replay=(--replay "$trace")
  bench tiers "$folder" -p 512 -n 128 -r 3 --chunk 512 --vram "$vram" "${replay[@]}"
  bench tiers_device_alone "$folder" -p 512 -n 128 -r 3 --chunk 512 --vram "$vram" --cpu-experts off "${replay[@]}"
  [[ -n $trace ]] || return
  local steps
  read -r -a steps < <(trace_steps "$trace")
  bench tiers_once "$folder" -p "${steps[0]}" -n "${steps[1]}" -r 1 --chunk 512 --vram "$vram" "${replay[@]}"
}

bench_disk() {
  local folder vram part replay=()
  folder=$(model 35b-a3b) || { failed=1; return; }
  vram=$(quarter "$folder") || { failed=1; return; }
  [[ -n $trace ]] && replay=(--replay "$trace")
  for part in 10 20 50; do
    bench "disk_$part" "$folder" -p 512 -n 64 -r 3 --chunk 512 --vram "$vram" --ram "$(field "$scratch/quarter.json" "int(d['expert_bytes'] / $part + 6e8)")" "${replay[@]}"
  done
}

bench_mla() {
  local folder
  folder=$(model v3 --layers 4 --dense 1) || { failed=1; return; }
  bench mla_32k "$folder" -p 32768 -n 32 -r 1 --no-probe
}

all=(tests determinism sanitize bench_ops bench_all bench_tiers bench_disk bench_mla)
(($# > 0)) || set -- "${all[@]}"
mkdir -p "$scratch"
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
for name in "$@"; do
  [[ " ${all[*]} " == *" $name "* ]] || { echo "there is no $name; there are: ${all[*]}"; exit 2; }
  "$name"
done
((failed)) && { echo FAILED; exit 1; }
echo 'all passed'
