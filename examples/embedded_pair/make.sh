#!/usr/bin/env bash
# Trains the embedded pair from nothing, into the folder given; run again, it goes on.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=examples/embedded_pair
runs=${1:?give a folder for the runs}
python=${PYTHON:-python}
mkdir -p "$runs"
# Large pages for the gigabytes that every step allocates anew: glibc's, where it is.
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.arena_max=1
GLIBC_TUNABLES+=:glibc.malloc.trim_threshold=20000000000

# Goes on with a run that has begun.
resume() { if [ -f "$1/log.jsonl" ]; then echo --resume; fi; }

# Runs a module of this folder with two cores as two devices.
on_both() {
  XLA_FLAGS=--xla_force_host_platform_device_count=2 \
    "$python" -m "examples.embedded_pair.$1" --output "${@:2}" $(resume "$2")
}

# Runs a command on one core, so that another can run beside it.
on_core() {
  if command -v taskset > /dev/null; then taskset -c "$@"; else "${@:2}"; fi
}

# Lets the target continue texts: at a temperature, this many.
answers() {
  head -n "$2" "$runs/shallow/train.jsonl" > "$runs/begun-$1.jsonl"
  "$python" scripts/regenerate.py --target "$runs/shallow/model" \
    --data "$runs/begun-$1.jsonl" --max-new-tokens 160 --batch-size 8 \
    --min-prefix 16 --max-prefix 200 --temperature "$1" --output "$runs/answers-$1.jsonl"
}

export -f answers
export runs python here

on_both pretrain "$runs/shallow"
on_core 0 bash -euc 'answers 1 2400' &
on_core 1 bash -euc 'answers 0 600'
"$python" -m examples.embedded_pair.pretrain --output "$runs/small" \
  --config "$here/small.toml" --tokenizer "$runs/shallow" $(resume "$runs/small")
wait $!

head -n 800 "$runs/shallow/train.jsonl" > "$runs/source.jsonl"
texts=("$runs/answers-0.jsonl" "$runs/answers-1.jsonl")
"$python" scripts/train.py --target "$runs/shallow/model" --output "$runs/head" \
  --config "$here/head.toml" --data "$runs/source.jsonl" "${texts[@]}" \
  $(resume "$runs/head")

# Target and head together, the target twice as deep, on sampled texts for the most
# part: they are the harder ones.
on_both together "$runs/pair" --config "$here/together.toml" --num-layers 24 \
  --run "$runs/shallow" --head "$runs/head/head" --texts "${texts[@]}"

# What eagle_jax/assets holds.
rm -rf "$runs/assets"
mkdir "$runs/assets"
cp -r "$runs/pair/model" "$runs/assets/target"
cp -r "$runs/small/model" "$runs/assets/small"
cp "$runs/shallow/prompts.json" "$runs/assets/prompts.json"
"$python" scripts/export.py --head "$runs/pair/head" --dtype bfloat16 \
  --output "$runs/assets/head"
rm -f "$runs/assets/head/pytorch_model.bin"
# What the head's confidences are worth, on texts that nothing else reads.
"$python" scripts/calibrate.py --target "$runs/pair/model" --draft "$runs/pair/head" \
  --prompts "$runs/shallow/calibration_prompts.json" --max-new-tokens 96 \
  --output "$runs/assets/head/calibration.json"
