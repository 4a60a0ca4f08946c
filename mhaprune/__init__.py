"""Mask attention heads one at a time, measure what each is worth, and say so with intervals."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.1.0"


def _register() -> None:
    """Let transformers load the models that `mhaprune prune` exports."""
    from mhaprune.prune import modeling_pruned  # noqa: F401 - registers them


class _AfterTransformers:
    """Registers our models as soon as transformers is imported, and then steps aside.

    Importing mhaprune would take seconds if it imported transformers itself. What is found, and by
    whose loader, is left as it is; only the loader's `exec_module` is followed by `_register`.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "transformers":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _register()

            setattr(spec.loader, "exec_module", execute_and_register)  # noqa: B010 - of this one
        return spec


if "transformers" in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _AfterTransformers())
