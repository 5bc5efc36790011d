"""Names that changed since earlier versions, whose files (configs, weights, checkpoints) still contain them."""

from typing import Any

RENAMED = {
    "explainers.decomposition.Coalitions": "explainers.anyhead.CoalitionTeacher",
    "explainers.decomposition.Decomposition": "explainers.anyhead.AnyHead",
    "explainers.decomposition.Propagation": "explainers.anyhead.PropagationTeacher",
    "explainers.evaluation.Pictures": "explainers.report.Pictures",
    "explainers.evaluation.Reference": "explainers.report.Reference",
    "explainers.evaluation.figures": "explainers.report.figures",
    "explainers.evaluation.read_results": "explainers.results.read_results",
    "explainers.evaluation.run_figures": "benchmarks.papers.run_figures",
    "explainers.loggers": "explainers.running.loggers",
    "explainers.networks.FastSHAPNetwork": "explainers.shapley.FastSHAPNetwork",
    "explainers.networks.LightNetwork": "explainers.tve.LightNetwork",
    "explainers.networks.LightShapleyNetwork": "explainers.shapley.LightShapleyNetwork",
    "explainers.networks.PaperNetwork": "explainers.tve.PaperNetwork",
    "explainers.networks.VectorNetwork": "explainers.anyhead.AnyHeadNetwork",
    "explainers.networks.ViTShapleyNetwork": "explainers.shapley.ViTShapleyNetwork",
    "explainers.overlays": "explainers.report.overlays",
    "explainers.targets.Classifier": "explainers.training.Classifier",
}
"""Earlier → present name of a class, a function or a module."""

CLASSES = {old.rpartition(".")[2]: new.rpartition(".")[2] for old, new in RENAMED.items()}
"""Earlier → present name of a class, without its module, as identities contain it."""

ADDED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("explainers.networks.PaperNetwork", "PaperNetwork"), {"reconstruct": False}),
    **dict.fromkeys(("VectorNetwork", "AnyHeadNetwork"), {"paths": "direct"}),
}
"""`_target_` or `class` in earlier files → values of its arguments that are new, as it was computed then."""


def renamed(content: Any) -> Any:
    """Replace earlier names in a config or an identity: the values of `_target_` and `class`, at any depth.

    Arguments that an earlier version did not have are added, with the values that give its results.

    >>> renamed({"explainer": {"_target_": "explainers.decomposition.Decomposition"}, "seed": 0})
    {'explainer': {'_target_': 'explainers.anyhead.AnyHead'}, 'seed': 0}
    >>> renamed({"network": {"class": "VectorNetwork", "width": 8}})
    {'network': {'paths': 'direct', 'class': 'AnyHeadNetwork', 'width': 8}}
    >>> renamed({"class": "PaperNetwork", "decoder_width": 512})
    {'reconstruct': False, 'class': 'PaperNetwork', 'decoder_width': 512}
    """
    if isinstance(content, list):
        return [renamed(each) for each in content]
    if not isinstance(content, dict):
        return content
    named = str(content.get("_target_") or content.get("class"))
    present = ADDED.get(named, {}) | {key: renamed(value) for key, value in content.items()}
    if isinstance(present.get("_target_"), str):
        present["_target_"] = present_name(present["_target_"])
    if isinstance(present.get("class"), str):
        present["class"] = CLASSES.get(present["class"], present["class"])
    return present


def present_name(name: str) -> str:
    """Return the present name of what an earlier version called `name`.

    >>> present_name("explainers.loggers.History"), present_name("torch.optim.AdamW")
    ('explainers.running.loggers.History', 'torch.optim.AdamW')
    """
    for old, new in RENAMED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name
