"""Plain names for Opacus' recurrent layers: those of the torch layer that they replace."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import nn


def keep_names(replacement: nn.Module, original: nn.Module) -> None:
    """Makes the state and parameter order of `replacement` those of `original`, in place.

    Opacus' recurrent layers register their parameters under torch's names in another order, and a
    second time in their cells. Afterwards `named_parameters()` agrees with `original` in names and
    order, the state dict has these names only, and a state dict of `original` loads with
    ``strict=True``, at any depth. Layers without cells stay as they are.
    """
    if not hasattr(replacement, "old_to_new"):
        return
    given = replacement._parameters
    names = [name for name, _ in original.named_parameters(recurse=False)]
    replacement._parameters = {name: given[name] for name in names}
    # Opacus' own hook hides its cells' names only where the layer is the whole network.
    replacement._state_dict_hooks.clear()
    replacement.register_state_dict_post_hook(_drop_cells)  # type: ignore[no-untyped-call]
    replacement.register_load_state_dict_pre_hook(_add_cells)  # type: ignore[no-untyped-call]


def _drop_cells(
    module: nn.Module, state: MutableMapping[str, Any], prefix: str, _metadata: object
) -> None:
    for cell_name in module.old_to_new:  # type: ignore[union-attr]
        state.pop(prefix + cell_name, None)


def _add_cells(module: nn.Module, state: MutableMapping[str, Any], prefix: str, *_: object) -> None:
    for cell_name, name in module.old_to_new.items():  # type: ignore[union-attr, operator]
        if prefix + name in state:
            state[prefix + cell_name] = state[prefix + name]
