"""Collects the heatmaps of some images while explainers are measured, and keeps them in a file beside the results."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from explainers.errors import InputError, check_distinct, check_positive
from explainers.evaluation.passes import forward_passes
from explainers.models.names import class_index, class_names
from explainers.report.gallery import Picture
from explainers.report.overlays import CONSTANT, colour_scale, overlay
from explainers.report.results import row_file
from explainers.saved.files import file_name, printable
from explainers.saved.weights import read_tensors, save_tensors

CHEAP = 25  # largest number of forward passes of an explainer that also explains the other classes in pictures


class Pictures(Callback):
    """Collects images from all over the test set, with the heatmaps of every explainer, in `Trainer.test`.

    Explainers that depend on the class also explain the most likely other classes.

    Args:
        folder: folder of the run, see `write_pictures`.
        name: name of the task.
        images: number of images, evenly spaced in the test set; `None` takes all.
        classes: number of explained classes of each image: that of the metrics, then the most likely others. Or the
            explained classes, by name or index, the same of all images.
        keys: explainer → hash of what its heatmaps depend on, the `key` of its `Row`.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        images: int | None = 24,
        classes: int | Sequence[int | str] = 3,
        keys: Mapping[str, str] | None = None,
    ) -> None:
        numbers = {"classes": classes, "images": images}
        check_positive(**{name: number for name, number in numbers.items() if isinstance(number, int)})
        self.folder = Path(folder)
        self.name = name
        self.images = images
        self.classes = classes
        self.keys = keys or {}
        self.chosen_classes: list[int] = []
        self.signed: dict[str, bool | None] = {}
        self.rows: dict[str, dict[int, Tensor]] = {}
        """Entry of the file → index of the image → its row."""

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the chosen classes, before anything is explained."""
        if not isinstance(self.classes, int):
            names = class_names(pl_module.target, trainer.datamodule.class_names("test"))
            self.chosen_classes = class_indices(self.classes, names)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not outputs or "logits" not in outputs:
            return
        chosen = torch.isin(batch["index"].cpu(), self._choose_indices(trainer)).nonzero().flatten()
        if len(chosen):
            with trainer.precision_plugin.forward_context():  # Lightning sets it in test_step, not in callbacks
                self._collect(pl_module, {key: value[chosen] for key, value in batch.items()}, outputs, chosen)

    def _choose_indices(self, trainer: Any) -> Tensor:
        """Indices of the images, evenly spaced, so that a test set that is sorted by class gives different classes."""
        batches, size = sum(trainer.num_test_batches), trainer.datamodule.size("test")
        size = min(size, batches * trainer.datamodule.eval_batch_size * trainer.world_size)
        return torch.arange(size) if self.images is None else torch.linspace(0, size - 1, min(self.images, size)).long()

    def _collect(self, module: Any, batch: Mapping[str, Tensor], outputs: Any, chosen: Tensor) -> None:
        """Keep images of a batch, with the heatmaps of all classes."""
        scores, own = module.target.scores(outputs["logits"][chosen]), outputs["classes"][chosen]
        classes = self._choose_classes(scores, own)
        entries = {"image": batch["image"], "label": batch["label"], "classes": classes}
        entries |= {"truth": batch["truth"]} if "truth" in batch else {}
        entries["scores"] = scores.gather(-1, classes)
        passes = forward_passes(module.explainers)
        for name in module.names:
            explainer = module.explainers[name]
            self.signed[name] = getattr(explainer, "signed", None)
            heatmaps = [outputs["heatmaps"][name][chosen]]  # of the class of the metrics
            if not getattr(explainer, "ignores_classes", False):
                if self.chosen_classes:
                    heatmaps = [explainer(batch["image"], one) for one in classes.unbind(1)]
                elif passes[name] <= CHEAP:
                    heatmaps += [explainer(batch["image"], other) for other in classes[:, 1:].unbind(1)]
            entries[f"heatmaps/{name}"] = torch.stack(heatmaps, 1).detach().float()
        for key, values in entries.items():
            rows = self.rows.setdefault(key, {})
            rows |= dict(zip(batch["index"].tolist(), values.cpu().unbind(0), strict=True))

    def _choose_classes(self, scores: Tensor, own: Tensor) -> Tensor:
        """The explained classes (B, C) of images, from their scores (B, K) and the class of the metrics (B,)."""
        if isinstance(self.classes, int):
            others = scores.scatter(-1, own[:, None], -torch.inf)
            likely = others.topk(min(self.classes, scores.shape[-1]) - 1).indices
            return torch.cat([own[:, None], likely], 1)
        return torch.tensor(self.chosen_classes, device=own.device).expand(len(own), -1)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the pictures of all processes, and show them in W&B."""
        parts: list[Any] = [self.rows]
        if trainer.world_size > 1:
            parts = [None] * trainer.world_size
            torch.distributed.all_gather_object(parts, self.rows)
        rows = {key: {index: row for part in parts for index, row in part.get(key, {}).items()} for key in parts[0]}
        if not trainer.is_global_zero or not rows:
            return
        index = sorted(rows["image"])
        tensors = {key: torch.stack([values[i] for i in index]) for key, values in rows.items()}
        names = class_names(pl_module.target, trainer.datamodule.class_names("test"))
        data = trainer.datamodule
        files = image_names(data.dataset("test") if hasattr(data, "dataset") else None, index)
        signed = {
            name: bool((tensors[f"heatmaps/{name}"] < 0).any()) if own is None else own
            for name, own in self.signed.items()
        }
        keys = {name: self.keys.get(name, "") for name in self.signed}
        write_pictures(self.folder, self.name, tensors, files, names, signed, keys)
        for logger in trainer.loggers:
            if hasattr(logger, "log_table"):  # the logger of W&B
                log_pictures(logger, file_name(self.name), read_pictures(self.folder, self.name, keys))
                log_curves(logger, file_name(self.name), pl_module.results)


def image_names(samples: Any, indices: Sequence[int]) -> list[str]:
    """The files of images below the folder that all images of a data set share; numbers where there are no files."""
    if not hasattr(samples, "path"):
        return [f"image {index}" for index in indices]
    folder = os.path.commonpath([samples.path(index).parent for index in range(len(samples))])
    return [printable(samples.path(index).relative_to(folder).as_posix()) for index in indices]


def class_indices(chosen: Sequence[int | str], names: Sequence[str]) -> list[int]:
    """Find classes by their names or indices, given the name of each class of the model, see `class_index`."""
    if not chosen:
        raise InputError("expected pictures.classes as a number, or as one or more classes, got none")
    indices = [class_index(one, names, "pictures.classes") for one in chosen]
    check_distinct(**{"pictures.classes": [names[index] for index in indices]})
    return indices


def heatmap_file(folder: Path, task: str, explainer: str, key: str) -> Path:
    """The file with the heatmaps of a row in the folder of a run, see `Row`."""
    return row_file(folder, task, explainer, key).with_suffix(".safetensors")


def write_pictures(
    folder: Path,
    task: str,
    tensors: Mapping[str, Tensor],
    files: list[str],
    names: list[str],
    signed: Mapping[str, bool],
    keys: Mapping[str, str],
) -> None:
    """Write the images of a task to a file that their contents name, and heatmaps to a file beside each row.

    Args:
        folder: folder of the run.
        task: name of the task.
        tensors: name of an entry → its rows, one for each image.
        files: name of each image.
        names: name of each class.
        signed: explainer → whether its heatmaps are signed.
        keys: explainer → key of its row.
    """
    numbers = {number for key in ("classes", "label") for number in tensors[key].flatten().tolist() if number >= 0}
    described = {"files": files, "classes": {str(number): names[number] for number in sorted(numbers)}}
    digest = hashlib.sha256(json.dumps(described).encode())
    for key in ("image", "label", "classes"):
        digest.update(tensors[key].contiguous().numpy().data)
    path = folder / "pictures" / f"{file_name(task, 150)}-{digest.hexdigest()[:16]}.safetensors"
    save_tensors({key: own for key, own in tensors.items() if not key.startswith("heatmaps/")}, path, described)
    for name, key in keys.items():
        about = {"images": path.name, "signed": signed[name]}
        save_tensors({"heatmaps": tensors[f"heatmaps/{name}"]}, heatmap_file(folder, task, name, key), about)


def read_pictures(folder: Path, task: str, keys: Mapping[str, str]) -> list[Picture]:
    """Read the images of which most rows have heatmaps, with these heatmaps, in the order of the rows.

    Args:
        folder: folder of the run.
        task: name of the task.
        keys: explainer → key of its row.
    """
    paths = {name: heatmap_file(folder, task, name, key) for name, key in keys.items()}
    rows = {name: read_tensors(path, "heatmaps") for name, path in paths.items() if path.exists()}
    images = [about.get("images") for about, _ in rows.values()]
    if not images:
        return []
    file = max(images, key=images.count)
    rows = {name: row for name, row in rows.items() if row[0].get("images") == file}
    signed = {name: about["signed"] for name, (about, _) in rows.items()}
    identity, tensors = read_tensors(folder / "pictures" / file_name(str(file)), "pictures")
    pictures = []
    names = {number: printable(name) for number, name in identity["classes"].items()}
    for row, file in enumerate(identity["files"]):
        classes = [names[str(number)] for number in tensors["classes"][row].tolist()]
        label = int(tensors["label"][row])
        maps = {name: own["heatmaps"][row] for name, (_, own) in rows.items()}
        pictures.append(
            Picture(
                name=printable(file),
                image=tensors["image"][row],
                label=names[str(label)] if label >= 0 else None,
                classes=dict(zip(classes, tensors["scores"][row].tolist(), strict=True)),
                heatmaps={name: dict(zip(classes, by_class, strict=False)) for name, by_class in maps.items()},
                truth=tensors["truth"][row] if "truth" in tensors else None,
                signed=signed,
            )
        )
    return pictures


def log_pictures(logger: Any, task: str, pictures: Sequence[Picture]) -> None:
    """Log a table `<task>/pictures` to W&B: of each image its label, the explained class, and all overlays."""
    import wandb  # slow to import, and only needed here

    def shown(image: Tensor, caption: str | None = None) -> Any:
        return wandb.Image(np.ascontiguousarray(image.permute(1, 2, 0).numpy()), caption=caption)

    def drawn(picture: Picture, explainer: str, heatmap: Tensor) -> Any:
        scale = colour_scale(heatmap, picture.signed.get(explainer))
        colours = "yellow speaks for the class, blue against it" if scale.signed else "yellow is more important"
        return shown(overlay(picture.image, heatmap, signed=scale.signed), CONSTANT if scale.constant else colours)

    rows = []
    for picture in pictures:
        own = next(iter(picture.classes))
        overlays = [drawn(picture, name, heatmaps[own]) for name, heatmaps in picture.heatmaps.items()]
        rows.append([picture.name, picture.label, own, shown(picture.image), *overlays])
    columns = ["name", "label", "class", "image", *pictures[0].heatmaps]
    logger.log_table(key=f"{task}/pictures", columns=columns, data=rows)


def log_curves(logger: Any, task: str, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Log the curves of all explainers as a table `<task>/curves` to W&B, a row for each explainer and sparsity."""
    curves = list(dict.fromkeys(key for row in results.values() for key in row if key.endswith("_curve")))
    rows = [
        [name, *values]
        for name, row in results.items()
        for values in zip(row.get("sparsity", ()), *(row[key] for key in curves if key in row), strict=True)
    ]
    if rows:
        logger.log_table(key=f"{task}/curves", columns=["explainer", "sparsity", *curves], data=rows)
