"""What experiments cost at the size of ImageNet, computed without a GPU: Markdown tables.

    python benchmarks/scaling.py --images data/imagenet_samples
    python benchmarks/scaling.py --table flops --fraction 0.3

- `flops`: operations of a training step for each image, counted by `FlopCounterMode` in the steps of `fake_steps.py`,
  and images/s if a GPU reaches `--fraction` of its peak. Frozen: the sources of what is learned; network: all else.
- `days`: the configured training of experiments on ImageNet.
- `rows`: size of the cached rows of ImageNet (`cache=sources`), stored as float16, and whether reading them from a disk
  of `--disk` GB/s is faster than computing them in every epoch.
- `traffic`: what DDP sends in every step, over links of `--link` GB/s, beside the time of the step.
- `beton`: size of the files for FFCV, from up to 1000 images of the folder `--images`, written as `write_beton` does.

GB are 10⁹ bytes. No table holds a measured time.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, suppress
from functools import cache, partial
from io import StringIO
from pathlib import Path

from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other folders of the project are not installed

from benchmarks.fake_steps import Steps, build, compose_config, make_batch, row_shapes
from benchmarks.fake_tensors import count_bytes, fake
from benchmarks.memory import FASTSHAP, header, training_overrides
from datamodules.write_beton import write_beton
from explainers.errors import InputError
from explainers.images.transform import ImageTransform
from explainers.training.sources import complete

GPUS = {"RTX A5000": 111e12, "A100": 312e12, "H100 SXM": 989e12}
"""Operations/s of dense bf16 tensors, as NVIDIA states them."""
IMAGENET = {"train": 1_281_167, "val": 50_000}
BATCH = 8
"""Images of a counted step; 1 to 3 passes of a blank image in every step are its only part that is not per image."""
METHODS = (
    *("tve_vitb", "tve_vitb explainer.network.shared_trunk=true"),
    *(f"tve_vitb target={target}" for target in ("vit_large", "swin_base", "resnet50")),
    *("anyhead_vitb", "tve_vit_tiny target=vit_base", "vit_shapley target=vit_base", f"{FASTSHAP} target=vit_base"),
    *("self_explaining target=vit_base module.labels.prior=null", "surrogate target=vit_base"),
    *("linear_head target=vit_base", "full_finetuning target=vit_base"),
    *("anyhead_tower", "anyhead_tower target=clip_vit_b16", "anyhead_tower target=siglip_vit_b16"),
    *("anyhead_tower target=tinyclip", "anyhead_tower target=dinov2_vit_s14"),
)
"""`FlopCounterMode` cannot count white-box teachers and priors, which compute gradients within a forward pass."""
ON_IMAGENET = METHODS[:6]
ZERO = "module.loss.removals=[zero]"  # rows of the same size as of several removals, and counted more quickly
CACHED = (
    *("tve_vit_tiny target=vit_base", "tve_vit_tiny target=vit_base blocks=[11]"),
    f"anyhead target=vit_base {ZERO}",
    *("vit_shapley target=vit_base", METHODS[9], "linear_head target=vit_base"),
)


@cache
def flops(name: str) -> tuple[float, float]:
    """Operations of a training step for one image: of the sources, and of everything else."""
    cfg = compose_config(*training_overrides(name), "cache=none", f"data.batch_size={BATCH}")
    with fake(partial(build, cfg)) as (module, _):
        steps, batch = Steps(cfg, module), make_batch(cfg, module, BATCH)
        with FlopCounterMode(display=False) as whole:
            steps.loss(batch).backward()
        with FlopCounterMode(display=False) as frozen, suppress(InputError):  # raised if the whole model is trained
            complete(batch, module.sources)
    sources = frozen.get_total_flops() / BATCH
    return sources, whole.get_total_flops() / BATCH - sources


@cache
def row_bytes(name: str) -> int:
    """Bytes of the cached rows of one image: float16, and other numbers as they are."""
    cfg = compose_config(*training_overrides(name))
    with fake(partial(build, cfg)) as (module, _):
        shapes = row_shapes(cfg, module)
    sizes = [(math.prod(shape), 2 if dtype.is_floating_point else dtype.itemsize) for shape, dtype in shapes.values()]
    return sum(length * size for length, size in sizes)


def flops_table(options: argparse.Namespace) -> Iterator[str]:
    yield header("Experiment", "Frozen, GFLOPs/image", "Network, GFLOPs/image", *(f"{gpu}, images/s" for gpu in GPUS))
    for name in METHODS:
        sources, network = flops(name)
        rates = [f"{options.fraction * peak / (sources + network):.0f}" for peak in GPUS.values()]
        yield f"| {name} | {sources / 1e9:.1f} | {network / 1e9:.1f} | {' | '.join(rates)} |"


def days_table(options: argparse.Namespace) -> Iterator[str]:
    yield header("Experiment", "Images of the training", *(f"{n} × {gpu}, days" for gpu in GPUS for n in (1, 4)))
    for name in ON_IMAGENET:
        images = count_training_images(name)
        seconds = [images * sum(flops(name)) / (options.fraction * peak * n) for peak in GPUS.values() for n in (1, 4)]
        yield f"| {name} | {images:,} | {' | '.join(f'{each / 86400:.2f}' for each in seconds)} |"


def count_training_images(name: str) -> int:
    """Images of the configured training; a config of all GPUs of the machine has 4."""
    cfg = compose_config(*training_overrides(name))
    if cfg.trainer.max_steps < 0:
        return int(cfg.trainer.max_epochs * IMAGENET["train"])
    devices = 4 if cfg.trainer.devices == -1 else cfg.trainer.devices
    return int(cfg.trainer.max_steps * cfg.data.batch_size * devices * cfg.trainer.accumulate_grad_batches)


def rows_table(options: argparse.Namespace) -> Iterator[str]:
    gpu = next(iter(GPUS))
    yield header(
        *("Experiment", "kB/image", "ImageNet, GB", f"Read at {options.disk} GB/s, images/s"),
        *(f"Compute on {n} × {gpu}, images/s" for n in (1, 4)),
        "Read faster than 4 GPUs compute",
    )
    for name in CACHED:
        size, sources = row_bytes(name), flops(name)[0]
        read = options.disk * 1e9 / size
        computed = [options.fraction * GPUS[gpu] * n / sources for n in (1, 4)]
        cells = [f"{size / 1e3:.1f}", f"{size * IMAGENET['train'] / 1e9:.0f}", f"{read:.0f}"]
        cells += [f"{each:.0f}" for each in computed] + [f"{read / computed[1]:.1f} ×"]
        yield f"| {name} | {' | '.join(cells)} |"


def traffic_table(options: argparse.Namespace) -> Iterator[str]:
    gpu, n = next(iter(GPUS)), 4
    yield header(
        *("Experiment", "Gradients, MB", f"Sent by each of {n} GPUs, MB/step"),
        *(f"At {options.link} GB/s, ms", f"Step on {gpu}, ms"),
    )
    for name in ON_IMAGENET:
        cfg = compose_config(*training_overrides(name))
        with fake(partial(build, cfg)) as (module, _):
            size = count_bytes(weight for weight in module.parameters() if weight.requires_grad)
        sent = 2 * (n - 1) / n * size  # a ring: every part is added up, and then spread
        step = cfg.data.batch_size * sum(flops(name)) / (options.fraction * GPUS[gpu])
        cells = [f"{size / 1e6:.0f}", f"{sent / 1e6:.0f}", f"{sent / options.link / 1e6:.0f}", f"{1e3 * step:.0f}"]
        yield f"| {name} | {' | '.join(cells)} |"


def beton_table(options: argparse.Namespace) -> Iterator[str]:
    yield header("Written images", "kB/image", *(f"{split}.beton, GB" for split in IMAGENET))
    if options.images is None:
        return
    from ffcv.reader import Reader

    paths = sorted(path.resolve() for path in options.images.rglob("*") if path.suffix.lower() in (".jpeg", ".jpg"))
    paths = paths[:: -(-len(paths) // 1000)]
    with tempfile.TemporaryDirectory() as folder:
        for i, path in enumerate(paths):
            link = Path(folder, "images", str(i % 2), f"{i}.jpg")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
        out = Path(folder, "images.beton")
        with redirect_stderr(StringIO()):  # FFCV's progress
            write_beton(Path(folder, "images"), out, ImageTransform(crop_pct=0.875))
        size = Reader(str(out)).alloc_table["size"].sum() / len(paths)  # the file ends with an empty part of a page
    totals = [f"{size * count / 1e9:.1f}" for count in IMAGENET.values()]
    yield f"| {len(paths)} | {size / 1e3:.1f} | {' | '.join(totals)} |"


TABLES: dict[str, Callable[[argparse.Namespace], Iterator[str]]] = {
    "flops": flops_table,
    "days": days_table,
    "rows": rows_table,
    "traffic": traffic_table,
    "beton": beton_table,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What experiments cost at the size of ImageNet.")
    parser.add_argument("--table", action="append", choices=list(TABLES), help="repeatable (all)")
    parser.add_argument("--fraction", type=float, default=0.4, help="reached part of a GPU's peak (0.4)")
    parser.add_argument("--disk", type=float, default=3.0, help="GB/s of the disk of cached rows (3)")
    parser.add_argument("--link", type=float, default=10.0, help="GB/s between GPUs (10)")
    parser.add_argument("--images", type=Path, help="folder of JPEG files of ImageNet, for the table beton")
    options = parser.parse_args(arguments)
    for name in options.table or TABLES:
        print(f"\n{name}\n", flush=True)
        for line in TABLES[name](options):
            print(line, flush=True)


if __name__ == "__main__":
    main()
