"""The batch script that runs a job on Slurm: Ray on every node, then `streamrl launch` beside Ray's head."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from streamrl.launcher.job_nodes import HEAD, Job, NodeGroup

STOP_S = 120
"""Seconds before the time limit at which Slurm asks the run to end."""


@dataclass(frozen=True)
class SlurmOptions:
    """Options of a Slurm batch script; mappings are keyed by GPU type, 'head', or '' for all others."""

    partitions: Mapping[str, str] = field(default_factory=dict)
    gres: Mapping[str, str] = field(default_factory=dict)
    """Slurm's names of GPU types."""
    account: str = ""
    time: str = "24:00:00"
    setup: Sequence[str] = ()
    """Shell lines that run first."""
    shared_head: bool = False
    """Whether Ray's head shares the first GPU node instead of having a node of its own."""


BODY = r"""
set -e
{setup}
set +e -u -o pipefail
limit_s=${{STREAMRL_START_S:-600}}
head_node=$(scontrol show hostnames "${head_nodes}" | head -n 1)
for head_ip in ${{STREAMRL_HEAD_IP:-}} $(hostname --ip-address) $(hostname -I); do
    case $head_ip in 127.* | *:*) ;; *) break ;; esac
done
address=$head_ip:$((20000 + SLURM_JOB_ID % 5000))
export RAY_ADDRESS=$address RAY_TMPDIR=/tmp/streamrl-$SLURM_JOB_ID
# without its token, whoever reaches a node could run commands as this user (all nodes mount this folder)
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={runs_dir}/.ray-token-$SLURM_JOB_ID
steps=() launch=""
stop() {{
    local code=$?
    trap - EXIT
    trap '' INT TERM
    if [ -n "$launch" ] && kill -TERM "$launch" 2>/dev/null; then wait "$launch"; fi
    [ -z "$(jobs -r)" ] || kill -TERM "${{steps[@]}}" 2>/dev/null
    for _ in {{1..30}}; do [ -z "$(jobs -r)" ] || sleep 1; done
    [ -z "$(jobs -r)" ] || kill -KILL "${{steps[@]}}" 2>/dev/null
    rm -f "$RAY_AUTH_TOKEN_PATH"
    exit "$code"
}}
fail() {{ echo "error: $*" >&2; exit 1; }}
trap stop EXIT
trap 'exit 143' INT TERM
step() {{
    srun --overlap --mem=0 --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=0 --no-kill "$@" &
    steps+=($!)
}}
wait_for() {{
    local what=$1 until=$((SECONDS + limit_s)) pid
    while ! "$2"; do
        for pid in "${{steps[@]}}"; do
            kill -0 "$pid" 2>/dev/null || fail "a node's Ray has ended before there was $what; its reason is above"
        done
        [ "$SECONDS" -lt "$until" ] || fail "no $what within $limit_s s (STREAMRL_START_S)"
        sleep 2
    done
}}
head_answers() {{ ray status --address="$address" >/dev/null 2>&1; }}
all_there() {{
    python3 -c 'import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
sys.exit(sum(node["Alive"] for node in ray.nodes()) < {count})' "$address" >/dev/null 2>&1
}}
(umask 077 && mkdir -p {runs_dir} && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH") ||
    fail "cannot write Ray's token to $RAY_AUTH_TOKEN_PATH"
echo "Ray: head on $head_node ($address), {count} nodes in all"
{head}
wait_for "an answer of Ray's head" head_answers
{workers}
wait_for "Ray on {count} nodes" all_there

command=({command})
[ -z "${{STREAMRL_RESUME:-}}" ] || command=({resume} "$STREAMRL_RESUME")
trap 'kill -TERM "$launch" 2>/dev/null' INT TERM
"${{command[@]}}" &
launch=$!
wait "$launch"
code=$?
while kill -0 "$launch" 2>/dev/null; do wait "$launch"; code=$?; done
launch=""
echo "streamrl launch: exit code $code; to go on: STREAMRL_RESUME={runs_dir}/RUN sbatch SCRIPT"
exit "$code"
"""


def slurm_seconds(time: str) -> int:
    """Return the seconds of a time limit, `hours:minutes:seconds` or `days-hours[:minutes[:seconds]]`."""
    days, _, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return 60 * (60 * (24 * int(days or 0) + hours) + minutes) + seconds


def slurm_script(job: Job, groups: Sequence[NodeGroup], options: SlurmOptions) -> str:
    """Write a batch script; node groups, the head first, become components of a heterogeneous job.

    Pools get room for their `max_replicas`. The job's paths are the same on all nodes.
    """
    if options.shared_head:
        head, first, *further = groups
        groups = [replace(first, cpus=first.cpus + head.cpus, ray_cpus=first.ray_cpus + head.ray_cpus), *further]
    several, types = len(groups) > 1, len({group.gpu for group in groups if group.gpus})
    components, starts = [], []
    for number, group in enumerate(groups):
        where = group.name if group.name == HEAD else group.gpu
        kind = options.gres.get(group.gpu, group.gpu.lower() if types > 1 else "")
        gpus = [f"--gpus-per-node={kind + ':' if kind else ''}{group.gpus}"] if group.gpus else []
        memory = job.head_memory_gib if where == HEAD else job.memory_gib
        partition = options.partitions.get(where, options.partitions.get("", ""))
        wanted = [
            *([f"--partition={partition}"] if partition else []),
            *([f"--account={options.account}"] if options.account else []),
            *[f"--time={options.time}", f"--nodes={group.most}", "--ntasks-per-node=1"],
            *[f"--cpus-per-task={group.cpus}", f"--mem={memory}G" if memory else "--mem=0", "--no-kill", *gpus],
            "--no-requeue",  # it would begin a new run
        ]
        what = (
            "Ray's head, controller and service" if where == HEAD else f"nodes for {group.gpu}, {group.gpus} GPUs each"
        )
        components.append("\n".join([f"# {what}", *(f"#SBATCH {one}" for one in wanted)]))
        words = ["step", *([f"--het-group={number}"] if several else []), f"--cpus-per-task={group.cpus}", *gpus]
        given = ["--block", f"--num-cpus={group.ray_cpus}", f"--num-gpus={group.gpus}"]
        given += [f"--resources={json.dumps(group.resources)}"] if group.resources else []
        starts.append((shlex.join(words), shlex.join(given)))
    workers = []
    for number, (step, ray) in enumerate(starts):
        if count := groups[number].most - (number == 0):
            others = "" if number else ' --exclude="$head_node"'
            workers.append(f'{step} --nodes={count} --ntasks={count}{others} ray start --address="$address" {ray}')
    step, ray = starts[0]
    body = BODY.format(
        setup="\n".join(options.setup) or ":",
        head_nodes="SLURM_JOB_NODELIST" + ("_HET_GROUP_0" if several else ""),
        count=sum(group.most for group in groups),
        head=f'{step} --nodes=1 --ntasks=1 --nodelist="$head_node" ray start --head --node-ip-address="$head_ip" '
        f'--port="${{address##*:}}" --ray-client-server-port=$((25000 + SLURM_JOB_ID % 5000)) '
        f"--include-dashboard=false --disable-usage-stats {ray}",
        workers="\n".join(workers) or ":",
        command=shlex.join(job.command()),
        resume=shlex.join(job.command("RUN")[:-1]),
        runs_dir=job.runs_dir,
    )
    top = f"""#!/bin/bash
# {job.name}: start it with `sbatch SCRIPT`. After the time limit go on with:
#   STREAMRL_RESUME={job.runs_dir}/RUN sbatch SCRIPT
#SBATCH --job-name={job.name}
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:TERM@{STOP_S}
"""
    return top + "\n#SBATCH hetjob\n".join(components) + "\n" + body
