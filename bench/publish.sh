#!/usr/bin/env bash
# Measures what the project's pages show of a machine, into logs/NAME, and makes the pages of it.
#
#   bash bench/publish.sh logs/4-v100-torch2.14                    all parts: hours
#   bash bench/publish.sh logs/4-v100-torch2.14 ladder ancestors   some of them
#
#   MINUTES=9     of each result of bench run [14, or 60 on several GPUs]
#   DATASET=NAME  of these [cifar10 if it is there or quickly downloaded, else fashion-mnist]
#   WITH=slurm,horovod,apex,techniques: what these set up, where it is missing [nothing]
#   PHOTOS=DIR    photographs in train/ and val/, for imagenet.py [none: its parts are left out]
#   CIFAR=DIR     CIFAR-10 as image files, likewise, for the transcript [--dataset cifar10]
#
# A part that has its result is left out; what failed can be begun again. Nothing else should run on
# the machine meanwhile. Parts:
#
#   ladder techniques memory communication model exactness libraries ancestors
#             bench run, its groups
#   large     the ladder and the techniques at a batch of 2,048 (GPUs)
#   photos    the techniques on images of 224 pixels, resnet50 (GPUs)
#   tensor    the techniques that split layers, vit_b_16 (GPUs)
#   apex      mnmc_apex.py with O0, O1 and O2 (GPUs)
#   imagenet  how fast imagenet.py's loader and its training are by themselves
#   cifar10   five epochs of snsc.py with its defaults
set -euo pipefail
cd "$(dirname "$0")/.."
. bench/setup.sh
stop() { say "publish: $*"; exit 2; }

PARTS="ladder techniques ancestors cifar10 large photos imagenet apex"
PARTS="$PARTS memory communication model exactness libraries tensor"
case "${1:-}" in
logs/*) place=${1%/} && shift ;;
*) stop "give the folder of this machine's results first: bash bench/publish.sh logs/NAME" ;;
esac
for part in "$@"; do
    case " $PARTS " in *" $part "*) ;; *) stop "$part: give some of $PARTS" ;; esac
done
mkdir -p "$place"
facts='import torch; n = torch.cuda.device_count()
print(n, torch.cuda.get_device_properties(0).total_memory // 2**30 if n else 0)
print("bf16" if not n or torch.cuda.is_bf16_supported(including_emulation=False) else "fp16")'
read -r gpus gib half <<<"$("$PYTHON" -c "$facts" | tr "\n" " ")"
# The stages of a pipeline, the heads of a transformer and the shards of invariant.py are for 4.
four=$([ "$gpus" -le 4 ] || echo "--world 4")
small=$([ "$gib" -ge 24 ] || echo yes) # a V100 may have 16 GiB

run() { # a result of `bench run`: its folder, then its flags
    local folder=$place/$1
    shift
    set -- ${MINUTES:+--budget "$MINUTES"} ${DATASET:+--dataset "$DATASET"} \
        ${WITH:+--with "$WITH"} "$@"
    [ -e "$folder/table.md" ] || "$PYTHON" -m bench run --out "$folder" "$@"
}

transcript() { # what a script prints, and the probe's records: their name, then the command
    local name=$place/$1
    shift
    [ -e "$name.txt" ] && return
    rm -f "$name.jsonl"
    "$@" --log-json "$name.jsonl" | tee "$name.part" && mv "$name.part" "$name.txt"
}

ladder() { run bench; }
techniques() { run techniques --techniques; }
memory() { run techniques-memory --techniques memory; }
communication() { run techniques-communication --techniques communication; }
# unquoted: words
model() { run techniques-model --techniques model $four; }
exactness() { run techniques-exactness --techniques exactness $four; }
libraries() { run techniques-libraries --techniques libraries; }
ancestors() { run ancestors --techniques ancestors; }

large() { # the embedded images, which are repeated: CIFAR-10 would have an epoch of a few steps
    [ "$gpus" -gt 0 ] || return 0
    run bench-2048 --batch-size 2048 --dataset fashion-mnist
    run techniques-2048 --techniques --batch-size 2048 --dataset fashion-mnist
}

photos() { # the embedded images, enlarged on the GPU: the loader takes no longer than before
    [ "$gpus" -gt 0 ] || return 0
    run techniques-224 --techniques --arch resnet50 --image-size 224 \
        --batch-size "$([ "$small" ] && echo 64 || echo 128)"
}

tensor() { # a vision transformer, whose layers are large enough to be split
    [ "$gpus" -gt 0 ] || return 0
    # Every GPU has all images of a step. In the gate, the oracle's one GPU has them, in doubles.
    run techniques-tensor --techniques tensor --arch vit_b_16 --image-size 224 \
        --scaling strong --batch-size 32 $four
}

apex() {
    local level
    [ "$gpus" -gt 0 ] && "$PYTHON" -c 'import apex.amp, apex.parallel' 2>/dev/null || return 0
    for level in O0 O1 O2; do
        transcript "fashion-mnist-mnmc_apex-$level" "$PYTHON" -m torch.distributed.run \
            --standalone --nproc-per-node 1 bench/run/probe.py mnmc_apex.py \
            --dataset fashion-mnist --opt-level $level || return
    done
}

imagenet() {
    local how folder=$place/imagenet
    [ "${PHOTOS:-}" ] || return 0
    mkdir -p "$folder"
    [ -e "$folder/speed.jsonl" ] && return
    [ -e "$folder/loader-224.jsonl" ] ||
        "$PYTHON" -m bench loader --data "$PHOTOS" --out "$folder/loader-224.jsonl" ||
        return
    rm -f "$folder/speed.part"
    for how in "tf32" "$half" "$half --channels-last" "$half --channels-last --compile"; do
        # unquoted: words
        "$PYTHON" -m bench.lab.recipe --record "$folder/speed.part" --seconds 15 \
            --data "$PHOTOS" ${small:+--batch-size 64} --precision $how || return
    done
    mv "$folder/speed.part" "$folder/speed.jsonl"
}

cifar10() {
    if [ "${CIFAR:-}" ]; then
        transcript cifar10-jpeg-snsc "$PYTHON" bench/run/probe.py snsc.py \
            --dataset imagenet --data "$CIFAR" --image-size 32
    else
        transcript cifar10-snsc "$PYTHON" bench/run/probe.py snsc.py
    fi
}

failed=""
for part in ${*:-$PARTS}; do
    say "publish: $part, $(date +%T)"
    $part || failed="$failed $part"
done
"$PYTHON" -m bench readme
[ -z "$failed" ] || stop "failed:$failed; what is there stays, begin them again"
