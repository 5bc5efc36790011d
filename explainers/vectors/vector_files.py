"""Explainability vectors as files that stand alone: sparse, of 16 bits, with all that a model needs to take one."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.saved.identity import ROUNDED, Identity, architecture_hash, measure_distances, sketch_weights
from explainers.saved.weights import check_identity, read_header, read_tensors, read_weights, save_weights
from explainers.share.catalogue import VECTOR, VECTOR_COMMANDS, Catalogue, list_shipped, shipped
from explainers.training.state_dicts import State, part
from explainers.vectors.model_files import read_head
from explainers.vectors.task_arithmetic import keep_largest, select_learned, vector

KIND = "ExplainabilityVector"
"""What the header of such a file has as its `class`."""

TUNED = {"matrices": 0.5}
"""Largest distance of fine-tuned weights from those of the base model, relative to their size.

Fine-tuning moved ViT-Tiny by 0.002 to 0.016. DeiT-Tiny, of the same architecture and trained apart, is at 1.5."""


def available() -> Catalogue:
    """List the explainability vectors that are shipped with this package, by the names of their base models.

    >>> isinstance(available(), list)
    True
    """
    return list_shipped(VECTOR_COMMANDS, VECTOR)


def pack(tau: State) -> dict[str, Tensor]:
    """Keep the largest half of a vector, as float16: `<name>.values`, and `<name>.bits` with a bit for every entry."""
    packed = {}
    for name, value in keep_largest(tau, share=0.5).items():
        flat = value.cpu().flatten()
        if flat.any():
            packed[f"{name}.values"] = flat[flat != 0].half()
            packed[f"{name}.bits"] = torch.from_numpy(np.packbits((flat != 0).numpy()))
    return packed


def unpack(packed: State, like: State) -> dict[str, Tensor]:
    """The vector in the tensors of `pack`, float32, for a state dict of the shapes of `like`: 0 where nothing was kept.

    Raises:
        InputError: if tensors do not fit, as those of positions do not fit a model of images of another size.
    """
    tau = {name: torch.zeros(value.shape) for name, value in select_learned(like).items()}
    for name in (key.removesuffix(".bits") for key in packed if key.endswith(".bits")):
        bits, values = packed[f"{name}.bits"], packed.get(f"{name}.values", torch.empty(0))
        count = tau[name].numel() if name in tau else 0
        fits = bits.dtype == torch.uint8 and len(bits) == -(-count // 8)
        kept = torch.from_numpy(np.unpackbits(bits.numpy(), count=count)).bool() if fits else torch.empty(0)
        if not fits or kept.sum() != len(values):
            shape = list(tau[name].shape) if name in tau else "missing"
            raise InputError(
                f"vector= changes {name} of another size than the model's, which is {shape}: give a model of the image"
                " size at which the vector was learned, or another vector"
            )
        tau[name].view(-1)[kept] = values.float()
    return tau


def save_vector(trained: str | Path, base: TargetModel, path: Path, lambda_2: float) -> Path:
    """Write the vector of a self-explaining model that was trained from a base model, to a file that stands alone.

    Args:
        trained: `model.safetensors` of the self-explaining model.
        base: the base model.
        path: the file to write.
        lambda_2: the λ₂ to recommend.
    """
    identity, weights = read_weights(trained)
    own = base.backbone_identity()
    check_identity(identity, {"base_sha256": own["backbone_sha256"]}, trained)
    head = read_head([str(trained)])
    header = {
        "class": KIND,
        "model": identity["model"],
        "target": own,
        "architecture_sha256": architecture_hash(base.backbone, sized=False),
        "sketch": sketch_weights(base.backbone, sized=False),
        "grid": identity["grid"],
        "head": head.describe_reading(),
        "lambda_2": lambda_2,
    }
    return save_weights(pack(vector(part(weights, "backbone"), base.backbone.state_dict())), path, header)


def find_vector(name: str | Path, target: TargetModel, limits: Mapping[str, float] = ROUNDED) -> tuple[Path, Identity]:
    """Find the vector for a model, and read what its file says.

    Args:
        name: `shipped`, for any that is shipped; the name of the base model of one; or a file that `save_vector` wrote.
        target: the model: the base model up to rounding and the size of its images, or as near as `limits`.
        limits: largest relative distances of the weights, see `measure_distances`.

    Raises:
        InputError: if there is none.
    """
    entries = available()
    if Path(name).is_file():
        files = [Path(name)]
    else:
        known = entries if name == "shipped" else [shipped(str(name), entries)]
        files = [each.folder / VECTOR for each in known if each is not None]
    architecture, reasons = architecture_hash(target.backbone, sized=False), []
    for file in files:
        header = read_header(file, "a vector")
        if header.get("class") != KIND:
            raise InputError(f"vector={name} is no file of explainers.vectors.vector_files: give another one")
        if header["architecture_sha256"] != architecture:
            reasons.append(f"the architecture is not that of {header['model']}")
            continue
        distances = measure_distances(target.backbone, header["sketch"], sized=False)
        if all(distances[kind] <= limit for kind, limit in limits.items()):
            return file, header
        far = max(distances[kind] for kind in limits)
        origin = "" if limits is ROUNDED else "fine-tuned from "
        reasons.append(f"the weights are not {origin}those of {header['model']}, at a relative distance of {far:.2g}")
    reason = "; ".join(reasons) or ("none is shipped" if name == "shipped" else "there is no such vector")
    raise InputError(
        f"vector={name} does not fit {target.timm_name}: {reason}; train one for its base model"
        f" with `{VECTOR_COMMANDS['vector'].format(model=target.name)}`, and give its file"
    )


def read_vector(file: Path, target: TargetModel) -> dict[str, Tensor]:
    """Read the vector in a file for the weights of a model, whose device it gets."""
    tau = unpack(read_tensors(file)[1], target.backbone.state_dict())
    return {name: value.to(target.mean.device) for name, value in tau.items()}
