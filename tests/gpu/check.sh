#!/usr/bin/env bash
# What only a GPU can show: equality on the device, and where a round's time goes. At most 6 minutes on one GPU.
#
#   PYTHON=... tests/gpu/check.sh [FOLDER]     FOLDER: also write each section's output and record there
#
# Sets up nothing: PYTHON has torch for the GPU, this package, and pytest. DEVICE=cpu SHAPES=tiny tries the script out.
set -u
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python}
DEVICE=${DEVICE:-cuda}
SHAPES=${SHAPES:-qwen3-8b kimi}
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
summary=() failed=0

# section NAME SECONDS COMMAND...
section() {
    local name=$1 limit=$2 started=$SECONDS status
    shift 2
    echo "== $name"
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$folder/$name.txt"
    status=${PIPESTATUS[0]}
    case $status in
        0) verdict=ok ;;
        124 | 137) verdict="FAILED: more than $limit s" ;;
        *) verdict="FAILED: exit status $status" ;;
    esac
    [ "$status" -eq 0 ] || failed=1
    summary+=("$(printf '%-20s %4d s  %s' "$name" $((SECONDS - started)) "$verdict")")
}

section device 70 "$PYTHON" -m pytest -q -rs -p no:cacheprovider tests/gpu/test_device.py
for shape in $SHAPES; do
    # Most of it is plain decoding being compiled, once a shape.
    section "rounds-$shape" 140 "$PYTHON" -m hf_ddtree.cli bench rounds --shape "$shape" --device "$DEVICE" \
        --json "$folder/rounds-$shape.json"
done

echo "== summary (records in $folder)"
printf '%s\n' "${summary[@]}"
exit $failed
