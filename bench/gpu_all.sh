#!/usr/bin/env bash
# Everything that needs a GPU, in under five minutes: what machine, correctness, then speed.
#
#   bench/gpu_all.sh [OUT]      OUT: a folder for gpu.json, gpu.log (default: $OUT, else gpu-out)
#
# Needs Python 3.11 or newer with torch, numpy, CuPy for the driver's CUDA, msgpack and posix-ipc.
# Wheels in a folder wheels/ of this checkout are used beside what is installed (into OUT/site). What
# is missing after that is named. Use another interpreter with PYTHON=. To fetch wheels elsewhere:
#   pip download -d wheels --no-deps --only-binary :all: --python-version 3.12 \
#       --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 msgpack posix-ipc xxhash
# Ends with 0, 1 for a failed check or bench, 3 without a GPU or without what is needed.
set -uo pipefail
cd "$(dirname "$0")/.."
out="${1:-${OUT:-gpu-out}}"
mkdir -p "$out"
python="${PYTHON:-python3}"
if [ -x .venv/bin/python ] && [ -z "${PYTHON:-}" ]; then python=.venv/bin/python; fi
if [ -d wheels ]; then
    "$python" -m pip install -q --no-index --find-links wheels --no-deps --target "$out/site" \
        wheels/*.whl 2>/dev/null || echo "gpu_all: the wheels in wheels/ do not fit $("$python" --version)"
fi
export PYTHONPATH="$PWD:$PWD/client${PYTHONPATH:+:$PYTHONPATH}:$PWD/$out/site" PYTHONUNBUFFERED=1
case "$out" in /*) PYTHONPATH="$PWD:$PWD/client:$out/site" ;; esac
: >"$out/gpu.log"

run() {  # run NAME SECONDS COMMAND...: into the log; its status
    local name="$1" limit="$2"
    shift 2
    echo "== $name" | tee -a "$out/gpu.log"
    timeout "$limit" "$@" > >(tee "$out/$name.txt" | tee -a "$out/gpu.log") 2> >(tee -a "$out/gpu.log" >&2)
}

missing=$("$python" - <<'PY'
import importlib
def lacks(name):
    try:
        importlib.import_module(name)
    except Exception:
        return True
    return False
needed = ("torch", "numpy", "cupy", "msgpack", "posix_ipc")
print(", ".join(name for name in needed if lacks(name)))
PY
)
if [ -n "$missing" ]; then
    echo "gpu_all: not run: $python lacks $missing (wheels of it may lie in wheels/)"
    exit 3
fi
"$python" -c 'import json; from bench._gpu import machine; print(json.dumps(machine()))' \
    >"$out/machine.txt" 2>"$out/machine.err" || { tail -1 "$out/machine.err"; echo '{}' >"$out/machine.txt"; }
cat "$out/machine.txt" | tee -a "$out/gpu.log"

run check 130 "$python" -m bench.gpu_check
check=$?
if [ "$check" = 3 ] || [ ! -s "$out/machine.err" -a "$check" = 2 ]; then
    echo "gpu_all: nothing was run: see the line above"
    exit 3
fi
run bench 80 "$python" -m bench.gpu --json
bench=$?
run ttft 80 "$python" -m bench.ttft --engine hf --device cuda --shape 8b --json
ttft=$?
"$python" - "$out" "$check" "$bench" "$ttft" <<'PY'
import json, pathlib, sys
out = pathlib.Path(sys.argv[1])
def last(name):
    try:
        return json.loads(out.joinpath(name + ".txt").read_text().strip().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return None
status = dict(zip(("check", "bench", "ttft"), map(int, sys.argv[2:]), strict=True))
checks = out.joinpath("check.txt").read_text().splitlines()
found = {"machine": last("machine"), "status": status, "checks": checks,
         "bench": last("bench"), "ttft": last("ttft")}
out.joinpath("gpu.json").write_text(json.dumps(found, indent=1) + "\n")
print(json.dumps(found))
PY
[ "$check$bench$ttft" = 000 ]
