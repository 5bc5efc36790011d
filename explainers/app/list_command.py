"""`explainers list`: trained explainers, methods, and what needs an extra."""

import textwrap
from argparse import Namespace
from importlib.util import find_spec

from explainers.posthoc import AGGREGATIONS, method_names

EXTRAS = {
    "methods": (
        ("captum", "sklearn", "scipy", "torchmetrics", "matplotlib"),
        "ViT-CX, DeepLift, LIME (Lasso), benchmark",
    ),
    "clip": (("open_clip",), "texts, with models of CLIP and SigLIP"),
    "app": (("starlette", "uvicorn"), "serve"),
    "hub": (("transformers",), "models of Hugging Face transformers"),
    "train": (("lightning", "hydra"), "training, in the checkout"),
}
"""Extra of the package → what it installs, and what needs it."""


def list_all(options: Namespace) -> None:
    """Print trained explainers and the names of methods; with `--model`, those that explain this model."""
    from explainers.share.catalogue import available

    names, which = method_names(), "--model NAME lists those that explain a model"
    if any((options.model, options.weights, options.head)):
        names, which = list_model_methods(options)
    print("Trained explainers, for --method auto and for explainers.load:")
    print(textwrap.indent(f"{available()!r}\n", "  "))
    print(f"Methods without training, for --method ({which}):")
    print(textwrap.fill(", ".join(names), 98, initial_indent="  ", subsequent_indent="  "))
    if "DecompX" in names:
        print(f"  Behind a layerwise method: {', '.join(f'-{name}' for name in AGGREGATIONS)}, as in DecompX-SkipPLUS")
    print("  With options, in quotes: --method 'RISE(masks=500)'; a name that is no option lists those of the method")
    print("\nExtras:")
    for extra, (packages, purpose) in EXTRAS.items():
        installed = all(map(find_spec, packages))
        state = "installed" if installed else f"missing (pip install 'transferable-explainers[{extra}]')"
        print(f"  {extra:8} {state}, for {purpose}")


def list_model_methods(options: Namespace) -> tuple[list[str], str]:
    """Names of the methods that explain the model that the options name, and which they are, in words."""
    import timm  # here, because it takes seconds

    from explainers.app.options import model_and_methods
    from explainers.models import as_target
    from explainers.models.fetching import pretrained_config
    from explainers.posthoc.names import methods_for

    if options.weights or options.head:
        target, _ = model_and_methods(options)
    else:  # the architecture decides, so nothing is downloaded
        pretrained_config(options.model)
        target = as_target(timm.create_model(options.model))
    return methods_for(target), f"those that explain {target.name}"
