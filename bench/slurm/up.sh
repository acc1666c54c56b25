#!/bin/bash
# A real Slurm with two nodes on this machine: munged, slurmctld and two slurmd, all of whose files
# lie in one folder. Nothing is written to /etc/slurm, no systemd is needed: docs/howto/slurm.md.
#
#   eval "$(bash bench/slurm/up.sh [--install] [--gpus N] [FOLDER])"    FOLDER: /tmp/two-node-slurm
#   srun -N2 --ntasks-per-node=2 hostname
#   bash bench/slurm/down.sh [FOLDER]
#
# --install  apt-get install what is missing (Debian, Ubuntu)
# --gpus N   each node says that it has N GPUs; there are none, so only for what reads variables
#
# Prints the export line of SLURM_CONF. Exit code 2, and one line why, where it cannot be started.
set -euo pipefail

give_up() {
    echo "up.sh: $*" >&2
    exit 2
}

install=no gpus=0 folder=/tmp/two-node-slurm
while [ $# -gt 0 ]; do
    case $1 in
    --install) install=yes ;;
    --gpus) gpus=${2:?--gpus N} && shift ;;
    -*) give_up "$1: the flags are --install and --gpus N" ;;
    *) folder=$1 ;;
    esac
    shift
done

PATH=$PATH:/usr/sbin:/sbin
missing() {
    for name in munged slurmctld slurmd srun sinfo unshare; do
        command -v $name >/dev/null || echo $name
    done
}
[ "$(id -u)" = 0 ] || give_up "needs root: each node is a mount and UTS namespace"
if [ -n "$(missing)" ] && [ $install = yes ]; then
    command -v apt-get >/dev/null || give_up "--install knows apt-get only, install Slurm by hand"
    export DEBIAN_FRONTEND=noninteractive
    {
        apt-get -o DPkg::Lock::Timeout=120 update || true # the lists may be there already
        apt-get -o DPkg::Lock::Timeout=120 install -y --no-install-recommends \
            slurmctld slurmd slurm-client munge
    } >&2 || give_up "apt-get could not install slurmctld slurmd slurm-client munge"
fi
[ -z "$(missing)" ] || give_up "not found: $(missing | xargs). Add --install, on Debian or Ubuntu"

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bash "$here/down.sh" "$folder" >&2 # what an earlier run has left
mkdir -p "$folder"/{munge,run,log,state}
cd "$folder" && folder=$PWD
chmod 755 "$folder" "$folder/run"
chmod 700 munge

busy() { # is there a listener on this port of this address?
    (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null
}
for _ in {1..50}; do
    port=$((10000 + RANDOM % 10000)) # below the ports that systems hand out
    busy 127.0.0.1 $port || busy 127.0.0.2 $((port + 1)) || busy 127.0.0.3 $((port + 2)) || break
done

name=$(hostname -s)
cores=$((4 * $(nproc))) # said of each node: the cases of a benchmark are there together, asleep
cat >hosts <<HOSTS
127.0.0.1 localhost $name
127.0.0.2 node1
127.0.0.3 node2
HOSTS
cat >slurm.conf <<CONF
ClusterName=ladder
SlurmctldHost=$name(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/run/munge.sock,cred_expire=15
CredType=cred/munge
MailProg=/bin/true
PlugStackConfig=$folder/plugstack.conf
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
CommunicationParameters=NoCtldInAddrAny
SchedulerParameters=sched_interval=2
ReturnToService=2
KillWait=10
StateSaveLocation=$folder/state
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdSpoolDir=$folder/state/%n
SlurmdPidFile=$folder/run/%n.pid
SlurmdLogFile=$folder/log/%n.log
NodeName=node1 NodeAddr=127.0.0.2 Port=$((port + 1)) CPUs=$cores RealMemory=1000$(
    [ "$gpus" = 0 ] || echo " Gres=gpu:$gpus"
)
NodeName=node2 NodeAddr=127.0.0.3 Port=$((port + 2)) CPUs=$cores RealMemory=1000$(
    [ "$gpus" = 0 ] || echo " Gres=gpu:$gpus"
)
PartitionName=test Nodes=ALL Default=YES State=UP
CONF
if [ "$gpus" != 0 ]; then # any device file will do
    echo "GresTypes=gpu" >>slurm.conf
    echo "NodeName=node[1-2] Name=gpu File=/dev/tty[0-$((gpus - 1))]" >gres.conf
fi
# The daemons listen on their loopback addresses only. For slurmd that takes an option with which an
# srun inside a batch job hangs: so a slurmd reads a file that has it, and its jobs one without.
sed "s/NoCtldInAddrAny/NoCtldInAddrAny,NoInAddrAny/" slurm.conf >slurmd.conf
echo "CgroupPlugin=cgroup/v1" >cgroup.conf
: >plugstack.conf
head -c 1024 /dev/urandom >munge/munge.key
chmod 600 munge/munge.key

# The daemons get a clean environment: nothing of the caller's reaches a job by way of them.
start() {
    env -i PATH="$PATH" LANG=C SLURM_CONF="$folder/slurm.conf" "$@" </dev/null >>log/start.log 2>&1
}
said() {
    cat log/*.log 2>/dev/null | grep -iE 'error|fatal' | tail -n 1
}
start munged --force --key-file="$folder/munge/munge.key" --socket="$folder/run/munge.sock" \
    --pid-file="$folder/run/munged.pid" --log-file="$folder/log/munged.log" \
    --seed-file="$folder/munge/seed" || give_up "munged did not start: $(said)"
start slurmctld -f "$folder/slurm.conf" || give_up "slurmctld did not start: $(said)"
for node in node1 node2; do
    mkdir -p state/$node
    start unshare -mu bash -ec "hostname $node
        mount --bind hosts /etc/hosts
        mount --bind slurmd.conf slurm.conf
        slurmd -N $node -f '$folder/slurm.conf'
        for _ in {1..1200}; do [ -s run/$node.pid ] && break || sleep 0.05; done
        umount '$folder/slurm.conf'" || give_up "slurmd of $node did not start: $(said)"
done

export SLURM_CONF=$folder/slurm.conf
for _ in {1..600}; do
    states=$(sinfo -h -N -p test -o %t 2>/dev/null | xargs || true)
    [ "$states" = "idle idle" ] && break
    sleep 0.1
done
if [ "$states" != "idle idle" ]; then
    bash "$here/down.sh" "$folder" >&2
    give_up "the nodes are not ready after 60 s (${states:-no answer}): $(said)"
fi
echo "export SLURM_CONF=$SLURM_CONF"
