#!/usr/bin/env bash
# Runs everything that needs a GPU: the device's op and model tests, and the benchmark table. Usage:
#
#   tools/gpu_check.sh [BIN [SCRATCH]]
#
# BIN holds moeflux, cuda_test and cuda_engine_test (default: build/release/bin, made by ./dev test). SCRATCH takes a synthetic model
# of 20 GB, which stays for the next run (default: /tmp/moeflux-gpu). MOEFLUX_SANITIZER=1 adds compute-sanitizer over op tests and a decode.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." || exit 1
bin="${1:-build/release/bin}"
scratch="${2:-/tmp/moeflux-gpu}"
model="$scratch/35b-a3b"
failed=0

run() {
  printf '\n== %s\n' "$*"
  "$@" || failed=1
}

command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
run "$bin/cuda_test" --gtest_brief=1
run "$bin/cuda_engine_test" --gtest_brief=1
if [[ -n "${MOEFLUX_SANITIZER:-}" ]]; then
  for tool in memcheck racecheck initcheck; do
    run compute-sanitizer --tool "$tool" --error-exitcode 1 "$bin/cuda_test" --gtest_brief=1 --gtest_filter='*TwiceInARow*'
    run compute-sanitizer --tool "$tool" --error-exitcode 1 "$bin/moeflux" bench models/demo --backend cuda -p 40 -n 6 -r 1
  done
fi

mkdir -p "$scratch"
[[ -d "$model" ]] || run "$bin/moeflux" synth --shape 35b-a3b --out "$model"
run "$bin/moeflux" bench "$model" --backend cuda -p 512 -n 128
run "$bin/moeflux" bench "$model" --backend cuda -p 8192 -n 32
((failed)) && { echo FAILED; exit 1; }
echo 'all passed'
