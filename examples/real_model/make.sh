#!/usr/bin/env bash
# Lets a target write questions and answer them, and trains drafts for it on the answers,
# the best first. Run again, it goes on; what is done is a line of RUNS/results.txt. For
# more questions take another folder.
#
#     examples/real_model/make.sh TARGET RUNS
#
# A target that came in parts, as large files do, is joined first:
# cat model.gguf.part* > model.gguf
#
# As it stands it is for a GPU: five million tokens in hundreds of rows. On a CPU, where
# steps are eight times as fast with the last two flags:
# QUESTIONS=200 ROWS=32 STEPS=50 BATCH=8 LENGTH=512 DTYPE=float32 HEADS=eagle2 \
#   FLAGS="--cache-features --loss-vocab-size 8192" examples/real_model/make.sh ...
set -euo pipefail
target=$(realpath "${1:?give the target}")
mkdir -p "${2:?give a folder for the runs}"
runs=$(realpath "$2")
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD
python=${PYTHON:-python}
heads=${HEADS:-eagle2 hass eagle3 medusa small}
questions=${QUESTIONS:-25000} rows=${ROWS:-256} steps=${STEPS:-3000} batch=${BATCH:-16}
dtype=${DTYPE:-bfloat16} length=${LENGTH:-1024} rate=${RATE:-1e-3} flags=${FLAGS:-}

# Says how long a part took, whatever comes after it.
record() { echo "$(date -u +%FT%TZ) $* ($SECONDS s)" | tee -a "$runs/results.txt"; }

# Goes on with a run that has begun.
resume() { if [ -f "$1/log.jsonl" ]; then echo --resume; fi; }

write() {
  "$python" scripts/regenerate.py --target "$target" --dtype "$dtype" \
    --batch-size "$rows" --max-length "$length" "$@" | tail -n 1
}

# Trains a head of a kind, and lets it draft.
train() {
  "$python" scripts/train.py --target "$target" --dtype "$dtype" --output "$runs/$1" \
    --data "$runs"/answers-{0,1}.jsonl --row-length "$length" --batch-size "$batch" \
    --steps "$steps" --eval-every $((steps / 10 + 1)) --learning-rate "$rate" \
    --warmup-steps $((steps / 10)) $flags "${@:2}" $(resume "$runs/$1") |
    tail -n 1
}

record questions: "$(write --questions "$questions" --systems configs/systems.txt \
  --temperature 0.8 --top-p 0.95 --max-new-tokens 320 --output "$runs/questions.jsonl")"
# Every second answer is greedy, the others are sampled.
for temperature in 0 1; do
  awk -v odd="$temperature" 'NR > 1 && NR % 2 == odd' "$runs/questions.jsonl" \
    > "$runs/asked-$temperature.jsonl"
  record answers: "$(write --data "$runs/asked-$temperature.jsonl" --max-new-tokens 512 \
    --temperature "$temperature" --output "$runs/answers-$temperature.jsonl")"
done
for head in $heads; do
  case $head in
    eagle2) record "$head: $(train "$head" --kind eagle2)" ;;
    hass) record "$head: $(train "$head" --kind eagle2 --alignment 3 --top-k-loss 10)" ;;
    eagle3) record "$head: $(train "$head" --kind eagle3 --draft-vocab-size 16384)" ;;
    medusa) record "$head: $(train "$head" --kind medusa)" ;;
    small)
      record "$head: $("$python" -m examples.real_model.small_model --target "$target" \
        --config examples/real_model/small.toml --data "$runs"/answers-{0,1}.jsonl \
        --output "$runs/small" --steps "$steps" --batch-size "$batch" \
        $(resume "$runs/small") | tail -n 1)"
      ;;
    *) echo "HEADS = $head is none of eagle2, hass, eagle3, medusa, small" >&2; exit 2 ;;
  esac
done
