#!/usr/bin/env bash
# Tests and times of the kernels on a machine that has a GPU, torch, triton and transformers but no network.
#
#   benchmarks/kernels_gpu.sh WHEELS RESULTS    WHEELS as gpu_spine.sh fetch makes them; about 230 s
#
# Writes pytest.log, step.{log,json} and chains.{log,json} into RESULTS; fails if a part failed.
set -euo pipefail
cd "$(dirname "$0")/.."
wheels=$1 results=$2 status=0 site=$(mktemp -d)
mkdir -p "$results"
python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl
export PYTHONPATH="$site" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
python3 -m pip install --quiet --no-index --no-deps --no-build-isolation --no-compile --no-cache-dir --upgrade --target "$site" \
    ./pegainfer-core ./pegainfer-server ./pegainfer-qwen3
timeout 120 python3 -m pytest -m gpu tests/gpu/test_ops.py tests/gpu/test_attention.py -n 8 -W default -p no:cacheprovider -q \
    > "$results/pytest.log" 2>&1 || status=1
tail -n 15 "$results/pytest.log"
cd benchmarks
timeout 170 python3 step_gpu.py --out "$results/step.json" 2>&1 | tee "$results/step.log" || status=1
timeout 170 python3 linear_chains_gpu.py --out "$results/chains.json" --seconds "${SECONDS_OF_CHAINS:-110}" 2>&1 \
    | tee "$results/chains.log" || status=1
exit "$status"
