#!/usr/bin/env bash
# Measures on NVIDIA GPUs through the whole program (Ray, SQL, search): the nodes' health, the demo in
# bf16, and a sweep of the 1B Llama on one GPU. Ends within nine minutes.
#
#   bash benchmarks/gpu/run.sh OUT_DIR            needs a GPU and an installed environment; no network
#   bash benchmarks/gpu/run.sh OUT_DIR --dry-run  prints and plans what it would run; needs no GPU
#
# PYTHON      the interpreter, 3.11 or newer (default: .venv/bin/python if it exists, else python3)
# PYTHONPATH  unpacked wheels; the repository itself comes before them
# SECONDS_ALL every part ends by then (default 530)
#
# OUT_DIR gets nine small files: facts.txt, run.log, nodes.json, netbench.json (with two or more
# GPUs), best.jsonl, failures.csv, quickstart.csv, one-gpu.csv, sweep.sqlite.
# Exit codes: 0 if both sweeps measured something and the node is fit, 2 if there is no GPU or
# something is missing, else 1.
set -uo pipefail

out=${1:?usage: run.sh OUT_DIR [--dry-run]}
dry=${2:-}
[[ -z $dry || $dry == --dry-run ]] || {
    echo "run.sh: unknown option $dry; usage: run.sh OUT_DIR [--dry-run]" >&2
    exit 2
}

mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ ! -x .venv/bin/python ]] || PYTHON=.venv/bin/python
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0

program=("$PYTHON" -c 'import sys; from orchestrator.cli import main; sys.exit(main())')
sweep() { "${program[@]}" "$@"; }

# Name all missing packages at once, before anything is started.
"$PYTHON" - <<'PY' || exit 2
import importlib.util, sys
if sys.version_info < (3, 11):
    sys.exit(f"run.sh: Python {sys.version.split()[0]} is too old: 3.11 or newer is needed. Set PYTHON")
needed = "alembic numpy optuna psutil pydantic yaml ray rich sqlalchemy tenacity typer torch".split()
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(
        f"run.sh: {sys.executable} lacks {', '.join(missing)}:"
        " pip install '.[train,gpu]', or put unpacked wheels on PYTHONPATH"
    )
if importlib.util.find_spec("pynvml") is None:
    print("run.sh: no pynvml (nvidia-ml-py): utilisation and power stay unknown", file=sys.stderr)
PY

if command -v nvidia-smi >/dev/null; then
    mapfile -t memory_mib < <(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits \
        2>/dev/null | grep -E '^[0-9]+$')
else
    memory_mib=()
fi
num_gpus=${#memory_mib[@]}
if ((num_gpus == 0)) && [[ $dry != --dry-run ]]; then
    echo "run.sh: no NVIDIA GPU here (nvidia-smi names none). --dry-run shows what would be measured" >&2
    exit 2
fi
if ((num_gpus > 0)) && ! "$PYTHON" -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then
    echo "run.sh: nvidia-smi names $num_gpus GPU(s), but torch sees none:" \
        "is it a CPU build, or is CUDA_VISIBLE_DEVICES empty?" >&2
    exit 2
fi

# Weights, gradients and AdamW states take 16 bytes a parameter: 18 GiB for 1B. Activations and
# logits need more. The larger models have scripts of their own (python -m benchmarks.gpu.truth_8b).
# A dry run plans for an H200.
smallest_mib=$(printf '%s\n' "${memory_mib[@]:-143771}" | sort -n | head -n 1)
cut=(name=one-gpu model=llama-3.2-1b global_batch_tokens=64K)
((smallest_mib >= 30000)) || cut=(name=one-gpu model=llama-60m global_batch_tokens=64K)
device=auto
((num_gpus > 0)) || device=h200
cut+=("gpus=1" "gpus_per_node=1" "device=$device" 'axes.micro_batch_size=[1, 2, 4, 8]'
    'axes.recompute=[none, selective_ops, full, "full:8"]' 'axes.zero_stage=[0]'
    measurement.warmup_steps=2 measurement.max_steps=10
    'measurement.limits={rendezvous: 1min, first_step: 90s, steady: 30s, total: 2min}'
    search.max_trials=16)
# Two GPUs at most: the demo's second cell is data parallelism over two.
demo_gpus='[1]'
((num_gpus < 2)) || demo_gpus='[1, 2]'
demo=("gpus=$demo_gpus" "device=$device" name=quickstart precision=bf16)

if [[ $dry == --dry-run ]]; then
    echo "+ sweep doctor --cluster --json"
    ((num_gpus == 1)) || echo "+ sweep netbench --device cuda --json"
    echo "dry run: $num_gpus GPU(s) here; planned for $device with $smallest_mib MiB"
    echo "+ sweep run sweeps/quickstart.yaml ${demo[*]}"
    sweep plan sweeps/quickstart.yaml "${demo[@]}" --top 3 || exit 1
    echo "+ sweep run sweeps/8b.yaml ${cut[*]}"
    sweep plan sweeps/8b.yaml "${cut[@]}" --top 5 || exit 1
    exit 0
fi

SWEEP_HOME=$(mktemp -d) || exit 2
export SWEEP_HOME SWEEP_DB="sqlite:///$SWEEP_HOME/sweep.sqlite"
trap 'rm -rf "$SWEEP_HOME"' EXIT

facts() {
    date -u +%Y-%m-%dT%H:%M:%SZ
    git rev-parse HEAD 2>/dev/null
    nvidia-smi --format=csv \
        --query-gpu=index,name,driver_version,memory.total,power.limit,clocks.max.sm,compute_cap
    nvidia-smi topo -m 2>/dev/null
    nvidia-smi --query-compute-apps=pid,used_memory --format=csv # other processes on the GPUs
    lscpu | grep -E '^(Model name|CPU\(s\))'
    "$PYTHON" - <<'PY'
import sys
from importlib.metadata import PackageNotFoundError, version
import torch
nccl = ".".join(map(str, torch.cuda.nccl.version()))
print("python", sys.version.split()[0], "cuda", torch.version.cuda, "nccl", nccl)
for name in ("torch", "ray", "optuna", "sqlalchemy", "numpy", "nvidia-ml-py"):
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print(name, "unknown")
PY
}

bad=0
all=${SECONDS_ALL:-530}
# within SECONDS: the smaller of these and what is left of all.
within() {
    local left=$((all - SECONDS))
    ((left > 1)) || left=1
    echo $(($1 < left ? $1 : left))
}

# measure NAME LIMIT_SECONDS FILE OVERRIDE...: run a sweep, then store its best layouts and all trials.
# It starts no further trial a minute before its limit, so that the last one can end.
measure() {
    local name=$1 limit file=$3
    limit=$(within "$2")
    shift 3
    if ((limit < 20)); then
        echo "no time is left for sweep run $name"
        bad=1
        return
    fi
    set -- "$@" "search.max_wall_time=$((limit > 80 ? limit - 60 : limit / 4 + 1))s"
    echo "+ sweep run $file $*"
    # At the limit SIGTERM ends the running trials; everything measured is in the store. --foreground
    # sends it to the sweep alone, and not to its Ray.
    timeout --foreground --signal=TERM --kill-after=30 "$limit" "${program[@]}" run "$file" "$@"
    echo "sweep run $name ended with $? after $SECONDS s in all"
    sweep best "$name" --top 3 --json >>"$out/best.jsonl" &&
        sweep export csv --sweep "$name" -o "$out/$name.csv" || bad=1
    sweep best "$name" --top 5
    local query="select count(*) from v_trial where sweep = '$name' and state = 'measured'"
    [[ $(sweep sql "$query" --format csv | tail -n 1 | tr -d '\r') -gt 0 ]] || bad=1
}

: >"$out/best.jsonl"
facts >"$out/facts.txt" 2>&1
{
    # Real NVML: processes, memory at rest, ECC, Xids, and two seconds of matrix products per GPU.
    echo "+ sweep doctor --cluster --json"
    timeout --foreground "$(within 90)" "${program[@]}" doctor --cluster --json >"$out/nodes.json" || bad=1
    "$PYTHON" - "$out/nodes.json" <<'PY' || bad=1
import json, sys
for node in json.load(open(sys.argv[1]))["nodes"]:
    unread = node["facts"]["unread"] if node["facts"] else ""
    print(node["node"], "fit" if node["is_fit"] else "NOT FIT", unread)
    for check in node["checks"]:
        print(f"  {check['status']:<4} {check['name']:<8} {check['found']}")
    gpus = node["facts"]["gpus"] if node["facts"] else []
    assert gpus, "no GPU was seen through NVML: is nvidia-ml-py installed?"
    assert all(gpu["matmul_flops"] for gpu in gpus), "a GPU has done no matrix product"
PY
    if ((num_gpus > 1)); then
        echo "+ sweep netbench --device cuda --json"
        timeout --foreground "$(within 90)" "${program[@]}" netbench --device cuda --json \
            >"$out/netbench.json" || bad=1
        sweep sql --format csv 'select collective, num_ranks,
            max(bus_bytes_per_second) / 1e9 as gigabytes_per_second
            from link group by 1, 2 order by 1, 2'
    fi
    measure quickstart 100 sweeps/quickstart.yaml "${demo[@]}"
    # What follows it takes some seconds.
    measure one-gpu $((all - SECONDS - 25)) sweeps/8b.yaml "${cut[@]}"
    sweep sql 'select * from v_failure' --format csv >"$out/failures.csv"
} > >(tee "$out/run.log") 2>&1
"$PYTHON" - "$SWEEP_HOME/sweep.sqlite" "$SWEEP_HOME/copy.sqlite" <<'PY' &&
import sqlite3, sys
sqlite3.connect(sys.argv[1]).execute("vacuum into ?", (sys.argv[2],))
PY
    mv -f "$SWEEP_HOME/copy.sqlite" "$out/sweep.sqlite"
exit "$bad"
