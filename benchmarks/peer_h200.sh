#!/usr/bin/env bash
# pegainfer against vLLM on a machine with one GPU, torch, triton and transformers (Linux, Python 3.12) but no network.
# Goals P1 to P7, or P10 where SHAPE=qwen35-4b is set for both engines; what is measured is in peer_h200.py.
#
# Where there is a network, in the checkout (all of it goes into .peer, which git should ignore):
#   benchmarks/peer_h200.sh fetch VLLM     VLLM: folder of fetch_vllm.sh's parts; makes .peer/wheels and .peer/parts/part.NN
#   benchmarks/peer_h200.sh stamp          writes the commit into .peer/wheels; again after every commit
# On the GPU machine, in a copy of the checkout; HOME stands for any folder that outlasts a call. One part a call, because a
# call takes 64 MiB along (left: what travels beside the checkout):
#   .peer/parts/part.00                  mkdir -p ~/peer && cp .peer/parts/part.* ~/peer/
#   .peer/parts/part.01, then part.02    the same
#   .peer/parts/part.03 .peer/wheels     mkdir -p ~/peer && cp .peer/parts/part.03 ~/peer/ &&
#                                        benchmarks/peer_h200.sh ours .peer/wheels ~/peer "$OUT"     about 200 s
#   nothing                              benchmarks/peer_h200.sh vllm ~/peer "$OUT"      about 350 s; compares at the end
# The last one returns ours.json, vllm.json and peer.json. Both must run on one machine without a reboot between them. The
# comparison alone, anywhere:
#   python benchmarks/peer_h200.py compare ours.json vllm.json --out benchmarks/results/DATE-h200-peer.json
#
# FLAGS="--flag=--name=value ..." adds server flags to either engine; STARTS=2 also starts vLLM with warm caches (80 s more).
set -euo pipefail
cd "$(dirname "$0")/.."
OURS=(pegainfer-core pegainfer-server pegainfer-qwen3 pegainfer-qwen35)
PART_BYTES=57M

fetch() {
    mkdir -p .peer/parts
    benchmarks/gpu_spine.sh fetch .peer/wheels
    python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version "${PYTHON_VERSION:-3.12}" --implementation cp \
        --abi abi3 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        --platform manylinux_2_12_x86_64 --platform manylinux2010_x86_64 --dest .peer/wheels "$(grep '^psutil==' constraints.txt)"
    cat "$1"/vllm.[0-9]* | split -b "$PART_BYTES" -d - .peer/parts/part.
    stamp
    du -sh .peer/wheels .peer/parts/*
}

stamp() {
    git describe --always --dirty --abbrev=40 --exclude '*' > .peer/wheels/COMMIT
    cat .peer/wheels/COMMIT
}

ours() {
    local wheels=$1 work=$2 out=$3
    mkdir -p "$work" "$out"
    if [ ! -d "$work/site" ]; then
        python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" "$wheels"/*.whl
    fi
    PYTHONPATH="$work/site" python3 -m pip install --quiet --no-index --no-deps --no-build-isolation --no-compile \
        --no-cache-dir --upgrade --target "$work/site" "${OURS[@]/#/./}"
    python3 -m compileall -q -j 0 "$work/site" || true  # as a plain pip install does; templates in packages may not compile
    cp "$wheels/COMMIT" "$work/COMMIT"
    client ours "$work" "$out"
    cp "$out/ours.json" "$work/ours.json"
}

vllm() {
    local work=$1 out=$2
    mkdir -p "$out"
    if [ ! -d "$work/vllm" ]; then
        mkdir "$work/vllm"
        cat "$work"/part.* | tar -C "$work/vllm" -xzf -
        python3 -m compileall -q -j 0 "$work/vllm" || true
    fi
    client vllm "$work" "$out" --site "$work/vllm" --starts "${STARTS:-1}"
    cp "$work/ours.json" "$out/ours.json"
    PYTHONPATH="$work/site" python3 benchmarks/peer_h200.py compare "$out/ours.json" "$out/vllm.json" \
        --out "$out/peer.json" >/dev/null
}

client() {
    local engine=$1 work=$2 out=$3
    shift 3
    # shellcheck disable=SC2086 - FLAGS is a list of words
    PYTHONPATH="$work/site" PEGAINFER_COMMIT="$(cat "$work/COMMIT")" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 \
        python3 benchmarks/peer_h200.py "$engine" --work "$work" --out "$out" --shape "${SHAPE:-qwen3-4b}" "$@" ${FLAGS:-} >/dev/null
}

case "${1:-}" in
    fetch) fetch "${2:?folder with the parts of vLLM}" ;;
    stamp) stamp ;;
    ours) ours "${2:?folder of wheels}" "${3:?folder to work in}" "${4:?folder for results}" ;;
    vllm) vllm "${2:?folder to work in}" "${3:?folder for results}" ;;
    *) sed -n '2,23s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
