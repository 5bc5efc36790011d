"""What a learned explainer says about how it is loaded, and how its class is found."""

import inspect
import re
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

from explainers.errors import needs
from explainers.share.building import imported, refused


class Loadable:
    """A learned explainer that `load` builds from the folder of its run."""

    weights_file: ClassVar[str] = "explainer.safetensors"
    """Name of the file of weights in the folder."""

    networks: ClassVar[tuple[type, ...]] = ()
    """Classes that a config from elsewhere may name as the explainer's `network`."""

    loaded_as: ClassVar["type[Loadable] | None"] = None
    """The class that `load` builds for a run of this one; `None` for this one itself."""

    @classmethod
    def settings_to_load(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """The arguments for loading, from the `settings` with which a run trained this class."""
        return settings


def learned_explainer(name: Any, trusted: bool = False) -> type[Loadable]:
    """Find the class that a config names as its explainer.

    Args:
        name: `explainers.<room>.<Class>`, where the room exports the class. No other module is imported.
        trusted: accept any importable name.

    Raises:
        InputError: if there is no such class, or it is not a `Loadable`.

    >>> learned_explainer("os.system")
    Traceback (most recent call last):
    explainers.errors.InputError: expected a learned explainer, explainers.<room>.<Class>, for explainer, got \
'os.system': a config from elsewhere may not name it; trust_config=True builds it anyway, if you trust its author
    """
    kind: Any = imported(name) if trusted else _exported(name)
    if not isinstance(kind, type) or not issubclass(kind, Loadable) or inspect.isabstract(kind):
        raise refused("explainer", "a learned explainer, explainers.<room>.<Class>,", name)
    return kind.loaded_as or kind


def _exported(name: Any) -> Any:
    """What a room of this project exports under the name; `None` for any other name."""
    parts = re.fullmatch(r"(explainers\.[a-z]+)\.([A-Za-z]+)", name) if isinstance(name, str) else None
    if parts is None or find_spec(parts[1]) is None:
        return None
    try:
        room = import_module(parts[1])
    except ModuleNotFoundError as error:  # self-explaining models are LightningModules
        needs(error.name or "lightning", "train", name)
        raise
    return getattr(room, parts[2]) if parts[2] in getattr(room, "__all__", ()) else None
