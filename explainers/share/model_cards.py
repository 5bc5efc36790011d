"""Model cards: what the page of a trained explainer on the Hugging Face Hub says."""

import shlex
from collections.abc import Mapping
from typing import Any

import timm
import torch
from huggingface_hub import ModelCardData

from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.saved.identity import Identity, architecture_hash

EXPLAINING = """\
explainer = explainers.load("{source}")  # or the folder of this file
heatmaps = explainer(images)  # uint8 (B, 3, H, W) → (B, rows, columns): the predicted classes"""
"""How a trained explainer is used."""


def model_card(
    kind: str,
    what: str,
    header: Identity,
    versions: Mapping[str, Any],
    table: str = "",
    license: str | None = None,
    source: str = "hf://user/name",
    images: str = "",
    use: str = EXPLAINING,
) -> str:
    """Describe a trained explainer: Markdown with the front matter of the Hugging Face Hub.

    Args:
        kind: class of the explainer.
        what: what it does, in one sentence.
        header: what its file says of it: the model that it explains, and its grid.
        versions: content of the run's `versions.json`; it may be empty.
        table: results in Markdown; empty for none.
        license: licence of the weights, as the Hub names it; `None` to name none.
        source: what `load` finds the explainer by.
        images: which images it was trained on; empty to leave that to the record of the run.
        use: code that uses it, with a place for `source`.
    """
    model, grid = header["target"], header["grid"]
    tags = ["explainability", "image-classification", kind.lower()]
    matter = ModelCardData(
        base_model=_base_model(header), library_name="transferable-explainers", license=license, tags=tags
    )
    cut = PatchGrid(grid["image_size"], grid["patch_size"])
    packages = ", ".join(f"{name} {version}" for name, version in versions.get("packages", {}).items() if version)
    parts = [
        f"---\n{matter.to_yaml()}\n---",
        f"# {kind} of {model['backbone']}",
        f"{what} It explains `{model['backbone']}` with backbone weights of SHA-256 `{model['backbone_sha256']}`,\n"
        f"for {cut.shape[0]} × {cut.shape[1]} patches of images of {cut.size[0]} × {cut.size[1]} pixels.",
        "## Use",
        f"```python\nimport explainers\n\n{use.format(source=source)}\n```",
        "## Training",
        f"```\n{shlex.join(['python', *versions.get('command', ['train.py'])])}\n```",
        f"Images: {images}" if images else "Its config is in `config.yaml`.",
        packages,
        f"## Evaluation\n\n{table.strip()}" if table else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _base_model(header: Identity) -> str | None:
    """The repository of timm's weights for a model of this name and architecture; `None` if there is none."""
    known = timm.get_pretrained_cfg(header.get("model", ""))
    if known is None or not known.hf_hub_id:
        return None
    with torch.device("meta"):
        model = TargetModel(timm.create_model(header["model"]))
    alike = architecture_hash(model.backbone) == header["target"].get("architecture_sha256")
    return known.hf_hub_id if alike else None
