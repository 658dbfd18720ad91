#!/usr/bin/env bash
# Trains the embedded pair from nothing, into the folder given; run again, it goes on.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=examples/embedded_pair
runs=${1:?give a folder for the runs}
python=${PYTHON:-python}
mkdir -p "$runs"

# Goes on with a run that has begun.
resume() { if [ -f "$1/run.json" ]; then echo --resume; fi; }

pretrain() {
  # Two cores are two devices.
  XLA_FLAGS=--xla_force_host_platform_device_count=2 \
    "$python" -m examples.embedded_pair.pretrain --output "$@" $(resume "$1")
}
pretrain "$runs/shallow"
pretrain "$runs/target" --config "$here/deep.toml" --deepen "$runs/shallow"
pretrain "$runs/small" --config "$here/small.toml" --tokenizer "$runs/target"

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

# What the head's confidences are worth, on texts that nothing else reads.
trees=eagle2:num_nodes=60,depth=8,width=6
"$python" scripts/evaluate.py --target "$runs/target/model" --draft "$runs/head/head" \
  --questions "$runs/target/calibration_prompts.json" --max-new-tokens 96 --nodes \
  --temperatures 0 1 --methods "$trees,kappa=1.5" "$trees,kappa=2" "$trees,kappa=3" \
  --output "$runs/calibration"

# What eagle_jax/assets holds.
rm -rf "$runs/assets"
mkdir "$runs/assets"
cp -r "$runs/target/model" "$runs/assets/target"
cp -r "$runs/small/model" "$runs/assets/small"
cp "$runs/target/prompts.json" "$runs/assets/prompts.json"
"$python" scripts/export.py --head "$runs/head/head" --dtype bfloat16 --embedding omit \
  --output "$runs/assets/head"
rm -f "$runs/assets/head/pytorch_model.bin"
"$python" scripts/calibrate.py "$runs/calibration" --num-nodes 26 \
  --output "$runs/assets/head/calibration.json"
