#!/usr/bin/env bash
# The demo's drafter trained anew on one GPU: text, training, calibration and weights in about ten minutes.
#   examples/train_on_gpu.sh OUT [sequences of text] [minutes of training]
set -euo pipefail
out=${1:?folder to write}
sequences=${2:-12000}
minutes=${3:-5}
hf-ddtree train --model smollm2 --out "$out" --sequences "$sequences" --answer-tokens 224 --batch-size 512 \
    --start-from model_cards/smollm2-135m-instruct-dflash --rows 48 --minutes "$minutes" --cache-gb 40
hf-ddtree bench drafter --drafter "$out" --data "$out/training/text.jsonl" --prompts 48
hf-ddtree inspect "$out" --model smollm2
