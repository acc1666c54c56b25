#!/bin/bash
# Two or more hosts on this machine: network namespaces on one bridge, each with its own host name,
# /etc/hosts and interface. Their traffic never leaves them. Needs root, and ip of iproute2.
#
#   bash bench/nodes/hosts.sh up 2 [--debian] [--rate 100mbit]
#   bash bench/nodes/hosts.sh run hostb COMMAND...
#   bash bench/nodes/hosts.sh ip hostb link set dev eth0 mtu 9000    ip, inside that host
#   bash bench/nodes/hosts.sh down
#
# hosta is 10.77.0.1, hostb 10.77.0.2, and so on, on eth0. Each also has the interface that Docker
# makes, docker0 with 172.17.0.1, by which no host reaches another.
#
# --debian   a host's own name means 127.0.1.1 on that host, as Debian and Ubuntu have it
# --rate     what each host can send at most
#
# HOSTS, a short word, begins the names of the namespaces, so that two sets can exist at once.
# Exit code 2, and one line why, where the hosts cannot be made.
set -euo pipefail

set_name=${HOSTS:-hosts}
letters=abcdefgh
PATH=$PATH:/usr/sbin:/sbin

give_up() {
    echo "hosts.sh: $*" >&2
    exit 2
}

names() { # of the namespaces that exist: the switch, then the hosts
    ip netns list 2>/dev/null | awk '{print $1}' | grep -E "^$set_name-(switch|host[a-h])$" || true
}

down() {
    local name pid
    for name in $(names); do
        for pid in $(ip netns pids "$name" 2>/dev/null); do
            kill -KILL "$pid" 2>/dev/null || true
        done
        ip netns delete "$name" # and its interfaces
        rm -rf "/etc/netns/$name"
    done
    rmdir /etc/netns 2>/dev/null || true
}

host_up() { # its number
    local k=$1 name=host${letters:$1:1} space own=10.77.0.$(($1 + 1)) other
    space=$set_name-$name
    ip netns add "$space"
    ip link add eth0 netns "$space" type veth peer name "$name" netns "$set_name-switch"
    ip -n "$set_name-switch" link set "$name" master switch up mtu 9000
    ip -n "$space" address add "$own/24" dev eth0
    ip -n "$space" link set lo up
    ip -n "$space" link set eth0 up mtu 1500
    ip -n "$space" link add docker0 type bridge
    ip -n "$space" address add 172.17.0.1/16 dev docker0
    ip -n "$space" link set docker0 up
    mkdir -p "/etc/netns/$space" # ip netns exec shows it as /etc/hosts
    {
        echo 127.0.0.1 localhost
        [ -z "$debian" ] || echo "127.0.1.1 $name"
        for ((other = 0; other < count; other++)); do
            [ -n "$debian" ] && [ "$other" = "$k" ] ||
                echo "10.77.0.$((other + 1)) host${letters:$other:1}"
        done
    } >"/etc/netns/$space/hosts"
    [ -z "$rate" ] ||
        tc -n "$space" qdisc add dev eth0 root handle 1: tbf rate "$rate" burst 256kb latency 50ms
}

up() {
    count=${1:-2} debian='' rate=''
    [[ $count =~ ^[2-8]$ ]] || give_up "up N: 2 to 8 hosts"
    shift || true
    while [ $# -gt 0 ]; do
        case $1 in
        --debian) debian=yes ;;
        --rate) rate=${2:?--rate 100mbit} && shift ;;
        *) give_up "$1: the flags are --debian and --rate" ;;
        esac
        shift
    done
    [ "$(id -u)" = 0 ] || give_up "needs root: each host is a network namespace"
    command -v ip >/dev/null || give_up "needs ip, of iproute2"
    down
    trap 'code=$?; [ $code = 0 ] || down; exit $code' EXIT
    ip netns add "$set_name-switch" || give_up "this machine allows no network namespaces"
    ip -n "$set_name-switch" link add switch type bridge
    ip -n "$set_name-switch" link set switch up
    for ((k = 0; k < count; k++)); do
        host_up "$k"
    done
}

inside() { # HOST COMMAND...
    local name=${1:?run HOST COMMAND...}
    shift
    ip netns list | grep -q "^$set_name-$name\b" || give_up "no $name: the hosts are: $(names | xargs)"
    exec ip netns exec "$set_name-$name" unshare -u sh -c 'hostname "$0" && exec "$@"' "$name" "$@"
}

case ${1:-} in
up) up "${@:2}" ;;
run) inside "${@:2}" ;;
ip) exec ip -n "$set_name-${2:?ip HOST ...}" "${@:3}" ;;
down) down ;;
*) give_up "the commands are: up N, run HOST COMMAND, ip HOST ..., down" ;;
esac
