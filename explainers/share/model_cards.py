"""Model cards: what the page of a trained explainer on the Hugging Face Hub says."""

import shlex
from collections.abc import Mapping
from typing import Any

import timm
import yaml
from huggingface_hub import ModelCardData

from explainers.saved.identity import Identity


def model_card(
    kind: str,
    what: str,
    identity: Identity,
    config: Mapping[str, Any],
    versions: Mapping[str, Any],
    table: str = "",
    license: str | None = None,
    source: str = "hf://user/name",
) -> str:
    """Describe a trained explainer: Markdown with the front matter of the Hugging Face Hub.

    Args:
        kind: class of the explainer.
        what: what it does, in one sentence.
        identity: what its weights belong to.
        config: the resolved config of its run.
        versions: content of the run's `versions.json`; it may be empty.
        table: results in Markdown; empty for none.
        license: licence of the weights, as the Hub names it; `None` to name none.
        source: what `load` finds the explainer by.

    >>> identity = {"target": {"backbone": "resnet50", "backbone_sha256": "c0ffee"}}
    >>> config = {"explainer": {"grid": {"image_size": 64, "patch_size": 8}}, "data": {"root": "images"}}
    >>> print(model_card("TVE", "Learns.", identity, config, {"command": ["train.py"]}).partition("## Use")[0])
    ---
    library_name: transferable-explainers
    tags:
    - explainability
    - image-classification
    - tve
    ---
    <BLANKLINE>
    # TVE of resnet50
    <BLANKLINE>
    Learns. It explains `resnet50` with backbone weights of SHA-256 `c0ffee`,
    for 8 × 8 patches of images of 64 × 64 pixels.
    <BLANKLINE>
    <BLANKLINE>
    """
    model = identity["target"]
    grid = config["explainer"]["grid"]
    tags = ["explainability", "image-classification", kind.lower()]
    matter = ModelCardData(
        base_model=_base_model(config), library_name="transferable-explainers", license=license, tags=tags
    )
    side = grid["image_size"] // grid["patch_size"]
    size = grid["image_size"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.get("packages", {}).items() if version)
    parts = [
        f"---\n{matter.to_yaml()}\n---",
        f"# {kind} of {model['backbone']}",
        f"{what} It explains `{model['backbone']}` with backbone weights of SHA-256 `{model['backbone_sha256']}`,\n"
        f"for {side} × {side} patches of images of {size} × {size} pixels.",
        "## Use",
        "```python\nimport explainers\n\n"
        f'explainer = explainers.load("{source}")  # or the folder of this file\n'
        "heatmaps = explainer(images)  # uint8 (B, 3, H, W) → (B, P, P): the predicted classes\n```",
        "## Training",
        f"```\n{shlex.join(['python', *versions.get('command', ['train.py'])])}\n```",
        f"```yaml\n{yaml.safe_dump({'data': config.get('data')}, sort_keys=False).strip()}\n```",
        packages,
        f"## Evaluation\n\n{table.strip()}" if table else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _base_model(config: Mapping[str, Any]) -> str | None:
    """The repository of the weights that timm fetched for the target; `None` for others."""
    model = config["explainer"].get("target", {}).get("model", {})
    if not model.get("pretrained") or model.get("checkpoint_path"):
        return None
    known = timm.get_pretrained_cfg(model.get("model_name", ""))
    return known.hf_hub_id if known is not None else None
