"""docs/howto/imagenet.md: the kills, a training, and how fast photographs are read."""

import statistics
from collections import Counter

from bench.experiments import loader
from bench.flops import flops, peak
from bench.show.table import markdown
from docs.make.logs import lines_of, logged, named, paragraph

# In records from before DALI moved to a script of its own, and as the page has them.
NAMES = {
    "decode_image alone": "only decode_image",
    "imagenet.py --loader dali": "imagenet.py with DALI's loader",
}


def kills() -> str:
    """The kills of tests/kills.py on each machine."""
    parts = []
    for path in logged("*/imagenet/kills.jsonl"):
        known = lines_of(path)
        acts = Counter(r["act"] for r in known if r["act"] != "none")
        ended = sum(r["finished"] for r in known)
        listed = ", ".join(f"{count} times {act}" for act, count in acts.most_common())
        text = f"On {path.parent.parent.name}: {acts.total()} kills ({listed}). imagenet.py "
        text += f"resumed after each kill. {ended} runs finished, all with the numbers of an "
        text += "undisturbed run, bit for bit"
        more = path.with_name("restarts.jsonl")
        if more.exists():
            count = len(lines_of(more))
            text += f". In one more run, torchrun restarted the processes after each of {count} "
            text += "kills, and this run also finished with the same numbers"
        parts.append(paragraph(f"{text}."))
    return "\n\n".join(parts)


def imagenette() -> str:
    """Each machine's training by imagenet.py: some epochs, and the time."""
    parts = []
    for path in logged("*/imagenet/imagenette.jsonl"):
        known = lines_of(path)
        evals = [r for r in known if r["event"] == "eval"]
        rows = [["epoch", "loss", "top-1", "top-5"]]
        shown = [r for r in evals if r["epoch"] % 6 == 0 or r is evals[-1]]
        rows += [
            [str(r["epoch"]), f"{r['loss']:.3f}", f"{r['top1']:.1%}", f"{r['top5']:.1%}"]
            for r in shown
        ]
        seconds = known[-1]["time"] - known[0]["time"]
        speed = [r["images_per_second"] for r in known if r["event"] == "train"]
        text = f"On {path.parent.parent.name}, the run took {seconds / 60:.1f} minutes and trained "
        text += f"{statistics.median(speed):.0f} images/s ([log](../../{named(path)})). Evaluated "
        text += f"on {evals[-1]['images']} photographs:"
        parts.append(f"{paragraph(text)}\n\n{markdown(rows)}")
    return "\n\n".join(parts)


def speeds() -> str:
    """Each machine's results of experiments/recipe.py: only training, its share of the GPU's
    peak, and only loading.
    """
    parts = []
    for path in logged("*/imagenet/speed.jsonl"):
        known = lines_of(path)
        first, size = known[0], known[0]["image_size"]
        count = first["world_size"]
        where = f"{count} x {first['device_name']}" if first["device_name"] != "cpu" else "a CPU"
        text = f"{first['arch']} at {size} pixels on {where}, torch {first['torch']}, batch "
        text += f"{first['batch_size']}, {first['workers']} decoders ([log](../../{named(path)})). "
        text += "MFU is the model's own operations as a share of the GPU's peak in that precision. "
        text += "They are three times those of its forward pass, less the images' gradient:"
        rows = [["", "only training, images/s", "MFU", "only loading, images/s"]]
        each, _ = flops(first["arch"], size, first["classes"])
        for r in known:
            flags = [r["precision"], "channels-last" * r["channels_last"], "compile" * r["compile"]]
            top = peak([r["device_name"]], r["precision"])
            share = f"{r['device'] * each / (top * count):.1%}" if top else ""
            cells = [", ".join(filter(None, flags)), f"{r['device']:,.0f}", share]
            rows.append([*cells, f"{r['loader']:,.0f}"])
        parts.append(f"{paragraph(text)}\n\n{markdown(rows)}")
    return "\n\n".join(parts) or "The effect of these flags has not been measured on GPUs."


def loaders() -> str:
    """Each machine's results of `bench loader`."""
    parts = []
    for path in logged("*/imagenet/loader-*.jsonl"):
        known = lines_of(path)
        side, what = known[0]["image_size"], known[0]["photographs"]
        what = f"enlarged to {what.replace('x', ' x ')} pixels" if what else "not enlarged"
        text = f"On {path.parent.parent.name}, each loader used {known[0]['workers']} processes or "
        text += f"threads. The photographs were {what}. All rows except *only decode_image* crop "
        text += f"and resize them to {side} x {side} pixels"
        rows = [["", "images/s", "relative to decoding", "relative to Pillow"]]
        for row in loader.analysed(known):
            cells = [loader.cell(row[name]) for name in ("of_decoding", "of_pillow")]
            name = NAMES.get(row["name"], row["name"])
            rows.append([name, f"{row['images_per_second']:,.0f}", *cells])
        parts.append(f"{paragraph(text)}:\n\n{markdown(rows)}")
        speeds = {row["name"]: row["images_per_second"] for row in loader.analysed(known)}
        decoded, made, sent = (
            1000 * known[0]["workers"] / speeds[name]
            for name in (loader.DECODE, loader.ITEMS, loader.OURS)
        )
        text = f"So a core needs {decoded:.2f} ms to decode an image, and {made - decoded:.2f} ms "
        text += "to crop, resize and flip it. To put it into a batch and send it to the training "
        text += f"process takes {sent - made:.2f} ms."
        parts.append(paragraph(text))
    return "\n\n".join(parts)
