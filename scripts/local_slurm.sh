#!/usr/bin/env bash
# A Slurm cluster of one node on this machine, to try launches out before they go to a real one.
#
#   scripts/local_slurm.sh up          start it; says what to export
#   scripts/local_slurm.sh down        stop it, with all its jobs
#   scripts/local_slurm.sh run CMD...  start one, run a command with it, stop it whatever happens
#
# Root only; needs Debian's slurmctld, slurmd, slurm-client and munge. It listens on the loopback,
# on free ports, and all it keeps is in one directory: LOCAL_SLURM_DIR, by default below TMPDIR.
# The node has LOCAL_SLURM_CPUS processors (2), which need not be there. Jobs in the partition
# "urgent" preempt those in "low", the default, which are then queued again.
set -euo pipefail

place=${LOCAL_SLURM_DIR:-${TMPDIR:-/tmp}/local_slurm}
PATH=$PATH:/usr/sbin

fail() {
    echo "local_slurm: $*" >&2
    exit 1
}

check() {
    [[ $EUID == 0 ]] || fail "only root can start it: slurmd starts jobs in the name of others"
    local program
    for program in munged slurmctld slurmd sinfo; do
        command -v "$program" >/dev/null ||
            fail "$program is missing: apt-get install slurmctld slurmd slurm-client munge"
    done
}

free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

memory_mb() {
    awk '/^MemTotal:/ {print int($2 / 1024)}' /proc/meminfo
}

configure() {
    local host cpus=${LOCAL_SLURM_CPUS:-2}
    host=$(hostname -s)
    mkdir "$place"/{munge,state,spool}
    chmod 755 "$place" "$place/munge"
    (umask 077 && head -c 1024 /dev/urandom >"$place/munge.key")
    cat >"$place/slurm.conf" <<CONF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$place/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$place/state
SlurmdSpoolDir=$place/spool
SlurmctldPidFile=$place/slurmctld.file.pid
SlurmdPidFile=$place/slurmd.file.pid
SlurmdParameters=config_overrides
# No cgroups, no accounting: what a container without systemd has not got.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# Preempted jobs are killed at the latest after KillWait seconds, and start again.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=1
SchedulerParameters=bf_interval=2,sched_interval=2
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cpus RealMemory=$(memory_mb) State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
CONF
}

# In a session of its own, so that a Ctrl-C meant for the command does not stop the cluster.
start() {
    local name=$1
    shift
    setsid "$@" >"$place/$name.log" 2>&1 </dev/null &
    echo $! >"$place/$name.pid"
}

start_daemons() {
    start munged munged --foreground --key-file="$place/munge.key" \
        --socket="$place/munge/socket" --seed-file="$place/munge/seed" \
        --pid-file="$place/munge/file.pid"
    wait_for "munged" test -S "$place/munge/socket"
    start slurmctld slurmctld -D -f "$place/slurm.conf"
    start slurmd slurmd -D -f "$place/slurm.conf"
    wait_for "an idle node" is_idle
}

is_idle() {
    [[ $(timeout 5 sinfo --noheader --format=%T 2>/dev/null | sort -u) == idle ]]
}

wait_for() {
    local what=$1 try
    shift
    for try in {1..120}; do
        if "$@"; then return; fi
        sleep 0.5
    done
    tail -n 5 "$place"/*.log >&2
    fail "no $what within a minute; the ends of the logs are above"
}

up() {
    check
    mkdir "$place" 2>/dev/null || fail "cannot make $place; if a cluster runs there: down first"
    trap clean_up EXIT
    configure
    export SLURM_CONF=$place/slurm.conf
    start_daemons
}

no_jobs() {
    [[ -z $(timeout 5 squeue --noheader 2>/dev/null) ]]
}

# Processes that are not ours, because ours died and their numbers were given out again, stay.
stop() {
    local pid try
    pid=$(cat "$place/$1.pid" 2>/dev/null) || return 0
    ours "$pid" || return 0
    kill "$pid"
    for try in {1..20}; do
        ours "$pid" || return 0
        sleep 0.25
    done
    kill -KILL "$pid" || true
}

ours() {
    grep -qsF "$place" "/proc/$1/cmdline"
}

clean_up() {
    local try
    export SLURM_CONF=$place/slurm.conf
    if timeout 10 scancel --user="$(id -un)" 2>/dev/null; then
        for try in {1..40}; do
            if no_jobs; then break; fi
            sleep 0.5
        done
    fi
    stop slurmd
    stop slurmctld
    stop munged
    rm -rf "$place"
}

case ${1:-} in
    up)
        up
        trap - EXIT
        echo "export SLURM_CONF=$place/slurm.conf"
        ;;
    down)
        [[ -f $place/slurm.conf ]] || fail "no cluster in $place"
        clean_up
        ;;
    run)
        shift
        [[ $# -gt 0 ]] || fail "run what? for example: run sinfo"
        place=$place.$$
        up
        "$@"
        ;;
    *)
        fail "up, down or run CMD...; see the first lines of $0"
        ;;
esac
