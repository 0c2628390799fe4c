#!/usr/bin/env bash
# The GPU tests and the first figures of the spine on a machine that has a GPU, torch, triton and transformers but no network.
#
#   benchmarks/gpu_spine.sh fetch WHEELS        where there is a network: collect what that machine lacks (Linux, Python 3.12)
#   benchmarks/gpu_spine.sh run WHEELS RESULTS  there, in a copy of this checkout: install, `pytest -m gpu`, measure
#
# `run` writes pytest.log, spine.log and spine.json into RESULTS and fails if a test or the measurement failed.
# COMMIT names the checkout in the results where git is not at hand; SWEEP=1 also tries other kernel tiles.
set -euo pipefail
cd "$(dirname "$0")/.."

NAMES=(annotated-types fastapi httpcore2 httptools httpx2 idna iniconfig jiter llguidance msgspec openai opentelemetry-api packaging
    pathspec pluggy pydantic pydantic-core pytest pytest-asyncio pytest-xdist execnet pyzmq shellingham sniffio starlette tomlkit trove-classifiers
    truststore typer typing-extensions typing-inspection uvicorn click rich anyio annotated-doc hatchling)
OURS=(pegainfer-core pegainfer-server pegainfer-qwen3 pegainfer-qwen35)

fetch() {
    local platforms=() number pins=() name
    for number in $(seq 39 -1 5); do platforms+=(--platform "manylinux_2_${number}_x86_64"); done
    platforms+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64 --platform any)
    for name in "${NAMES[@]}"; do
        pins+=("$(grep -i -E "^${name//-/[-_]}==" constraints.txt || echo "$name")")
    done
    mkdir -p "$1"
    python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version "${PYTHON_VERSION:-3.12}" --implementation cp \
        "${platforms[@]}" --dest "$1" "${pins[@]}"
    du -sh "$1"
}

run() {
    local wheels=$1 results=$2 site status=0
    site=$(mktemp -d)
    mkdir -p "$results"
    python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl
    export PYTHONPATH="$site" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
    python3 -m pip install --quiet --no-index --no-deps --no-build-isolation --no-compile --no-cache-dir --upgrade \
        --target "$site" "${OURS[@]/#/./}"
    # several processes, because most of the time goes into compiling kernels; warnings of this machine's own library
    # versions are shown, not raised
    timeout 330 python3 -m pytest -m gpu tests/gpu -n "${WORKERS:-6}" -W default -p no:cacheprovider -rA --durations=10 2>&1 \
        | tee "$results/pytest.log" || status=1
    timeout 220 python3 benchmarks/gpu_spine.py --out "$results/spine.json" ${SWEEP:+--sweep} 2>&1 \
        | tee "$results/spine.log" || status=1
    tail -n 3 "$results/pytest.log"
    return $status
}

case "${1:-}" in
    fetch) fetch "${2:?where to put the wheels}" ;;
    run) run "${2:?folder of wheels}" "${3:?folder for results}" ;;
    *) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
