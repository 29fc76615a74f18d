#!/usr/bin/env bash
# Everything that needs a GPU, in under five minutes: what machine, correctness, then speed.
#
#   bench/gpu_all.sh [OUT]      OUT: a folder for gpu.json and logs (default: $OUT, else gpu-out)
#
# Needs Python 3.11 or newer with torch, NumPy, CuPy for the driver's CUDA, msgpack, posix-ipc and
# xxhash; no network, no compiler. Wheels in a folder wheels/ of this checkout are used beside what is
# installed, those that fit. To fetch them elsewhere:
#   pip download -d wheels --no-deps --only-binary :all: --python-version 3.12 \
#       --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
#       posix-ipc lmdb zstandard xxhash msgpack
# PYTHON= names the interpreter; else .venv's or python3, whichever has CuPy. Ends with 0; 1 if a check or a bench failed or ran out of time; 3
# without a GPU or without what is needed. gpu.json is written in each case. What the parts do, and a
# dry run without a GPU: bench/_gpu_all.py.
set -eu
cd "$(dirname "$0")/.."
python="${PYTHON:-}"
if [ -z "$python" ]; then
    python=python3
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
    for one in .venv/bin/python python3; do
        if "$one" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("cupy") is None)' \
            2>/dev/null; then
            python="$one"
            break
        fi
    done
fi
export PYTHONPATH="$PWD:$PWD/client${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m bench._gpu_all "${1:-${OUT:-gpu-out}}"
