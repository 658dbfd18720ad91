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
resume() { if [ -f "$1/run.json" ]; then echo --resume; fi; }

# Runs a module of this folder with two cores as two devices.
on_both() {
  XLA_FLAGS=--xla_force_host_platform_device_count=2 \
    "$python" -m "examples.embedded_pair.$1" --output "${@:2}" $(resume "$2")
}
on_both pretrain "$runs/shallow"
on_both pretrain "$runs/target" --config "$here/deep.toml" --deepen "$runs/shallow"
on_both pretrain "$runs/small" --config "$here/small.toml" --tokenizer "$runs/target"

for samples in 0:2000 1:2000; do  # Temperature and number.
  temperature=${samples%:*}
  "$python" scripts/regenerate.py --target "$runs/target/model" \
    --data "$runs/target/train.jsonl" --config "$here/answers.toml" \
    --limit "${samples#*:}" --temperature "$temperature" --output "$runs/answers-$temperature.jsonl"
done
head -n 400 "$runs/target/train.jsonl" > "$runs/source.jsonl"
sed -n 401,5400p "$runs/target/train.jsonl" > "$runs/more.jsonl"
answers=("$runs/answers-0.jsonl" "$runs/answers-1.jsonl")
train() {
  "$python" scripts/train.py --target "$runs/target/model" --output "$@" $(resume "$1")
}
train "$runs/head-begun" --config "$here/head.toml" \
  --data "$runs/source.jsonl" "${answers[@]}"
all=("$runs/source.jsonl" "$runs/more.jsonl" "${answers[@]}")
train "$runs/head-further" --config "$here/acceptance.toml" --data "${all[@]}" \
  --begin-with "$runs/head-begun/head"
train "$runs/head" --config "$here/acceptance.toml" --data "${all[@]}" \
  --begin-with "$runs/head-further/head" --steps 24000

# Target and head together, on sampled texts for the most part: they are the harder ones.
head -n 800 "$runs/answers-0.jsonl" > "$runs/greedy.jsonl"
on_both together "$runs/pair" --config "$here/together.toml" --run "$runs/target" \
  --head "$runs/head/head" --texts "$runs/greedy.jsonl" "$runs/answers-1.jsonl"

# What the head's confidences are worth, on texts that nothing else reads.
trees=eagle2:num_nodes=60,depth=8,width=6
"$python" scripts/evaluate.py --target "$runs/pair/model" --draft "$runs/pair/head" \
  --questions "$runs/target/calibration_prompts.json" --max-new-tokens 96 --nodes \
  --temperatures 0 1 --methods "$trees,kappa=1.5" "$trees,kappa=2" "$trees,kappa=3" \
  --output "$runs/calibration"

# What eagle_jax/assets holds.
rm -rf "$runs/assets"
mkdir "$runs/assets"
cp -r "$runs/pair/model" "$runs/assets/target"
cp -r "$runs/small/model" "$runs/assets/small"
cp "$runs/target/prompts.json" "$runs/assets/prompts.json"
"$python" scripts/export.py --head "$runs/pair/head" --dtype bfloat16 --embedding omit \
  --output "$runs/assets/head"
rm -f "$runs/assets/head/pytorch_model.bin"
"$python" scripts/calibrate.py "$runs/calibration" --num-nodes 26 \
  --output "$runs/assets/head/calibration.json"
