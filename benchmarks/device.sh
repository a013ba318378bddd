#!/usr/bin/env bash
# Everything about speed that needs a device, in one go of less than 8 minutes: correctness of the kernel on it, then the
# kernel's table, then a verify step and decoding with LLaMA-7B's shapes and random weights.
#
#   benchmarks/device.sh           one GPU or TPU, from a checkout with jax importable; no package index, no weights
#   benchmarks/device.sh tiny      the same parts with tiny shapes, to try the script on a CPU
#
# OUT (out/device) takes the JSON files and logs, PYTHON (python3) is the interpreter. A part whose modules are missing
# is left out by name. Exit code: 1 if tree attention was wrong or a part failed, 2 if nothing could run, else 0.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
out=${OUT:-out/device}
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# What two programs share is compiled once; a folder of the caller's makes the next run shorter.
scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$scratch} JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
status=0

# Seconds of each part; with the kill delays and the probes they stay below 480.
check_limit=90 kernel_limit=150 llama_limit=200
check=(--check 60 --limit-seconds 75)
kernel=(--prefill 4096 --limit-seconds 130)
llama=(--shape llama-7b)
if [ "${1:-}" = tiny ]; then
    check=(--check 2 --limit-seconds 60)
    kernel=(--shapes tiny --rows 1,4 --context 40 --slots 2 --page-size 16 --repeats 2 --milliseconds 0.1 --prefill 512)
    llama=(--shape tiny --dtype float32 --context 20 --prompt 100 --tokens 8 --rows 8 --repeats 1)
elif [ -n "${1:-}" ]; then
    echo "error: unknown argument '$1'; known is tiny" >&2
    exit 2
fi

missing() { # missing MODULE...: those that cannot be imported
    timeout -k 3 8 "$python" - "$@" <<'PYTHON' || echo "(the probe failed)"
import importlib.util
import sys

print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
PYTHON
}

part() { # part NAME SECONDS COMMAND...
    local name=$1 limit=$2 code
    shift 2
    echo "== $name (at most $limit s)"
    timeout -k 3 "$limit" "$@" 2>&1 | tee "$out/$name.log"
    code=${PIPESTATUS[0]}
    [ "$code" = 124 ] || [ "$code" = 137 ] && echo "== $name: cut off after $limit s; what it had written is in $out"
    return "$code"
}

absent=$(missing jax numpy jaxtyping)
if [ -n "${absent// /}" ]; then
    echo "nothing can run, $python lacks: $absent" >&2
    exit 2
fi

part check "$check_limit" "$python" -m benchmarks.kernel "${check[@]}" --json "$out/check.json"
code=$?
if [ "$code" != 0 ]; then
    echo "tree attention is not right on this device, or the check did not end (exit code $code): nothing is timed" >&2
    exit 1
fi

part kernel "$kernel_limit" "$python" -m benchmarks.kernel "${kernel[@]}" --json "$out/kernel.json" || status=1

absent=$(missing flax tokenizers gguf jinja2 platformdirs filelock)
if [ -n "${absent// /}" ]; then
    echo "== llama: left out, $python lacks: $absent"
else
    part llama "$llama_limit" "$python" -m benchmarks.random_llama "${llama[@]}" --json "$out/llama.json" || status=1
fi
echo "== done, results in $out"
exit "$status"
