"""The target's hidden states, for dense retrieval: reading them from a forward, telling whose they are, projecting them.

Layers are numbered as transformers numbers `hidden_states`: -1 is what the output head sees, behind the final norm; -2 the
output of the last block but one, which NEST uses; 0 the embeddings. A state is read by a hook on the module whose output it
is, so the forward itself is unchanged and no other layer is kept.
"""

from __future__ import annotations

import hashlib
import weakref

import numpy as np
import torch
from transformers import PreTrainedModel

from redraft.retrieval.errors import IndexFormatError
from redraft.retrieval.state_map import StateMap, StateOrigin

__all__ = ["Projection", "StateTap", "state_width", "states_of", "weights_digest"]

_digests: weakref.WeakKeyDictionary[PreTrainedModel, str] = weakref.WeakKeyDictionary()


def weights_digest(model: PreTrainedModel) -> str:
    """Hexadecimal SHA-256 of all weights as they are in memory: names, types, shapes and values, in order of name.

    Read once per model: a gigabyte takes about a second.
    """
    if model not in _digests:
        digest = hashlib.sha256()
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
        _digests[model] = digest.hexdigest()
    return _digests[model]


def states_of(model: PreTrainedModel, layer: int, name: str | None = None) -> StateOrigin:
    """Whose states `model` has at `layer`."""
    dtype = str(model.dtype).removeprefix("torch.")
    return StateOrigin(name or model.name_or_path, weights_digest(model), dtype, layer)


def state_width(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().hidden_size)


class StateTap:
    """Keeps the hidden states [rows, q, d] of `layer` from every forward inside its `with` block, the latest ones only.

    Raises ValueError for a layer that the model has not, and for models whose blocks are not where transformers' decoders
    have them.
    """

    def __init__(self, model: PreTrainedModel, layer: int) -> None:
        decoder = model.base_model
        blocks = getattr(decoder, "layers", None)
        if blocks is None:
            raise ValueError(f"{type(model).__name__} has no list of layers: its hidden states cannot be read")
        if not -len(blocks) - 1 <= layer <= -1:
            raise ValueError(f"layer: wanted {-len(blocks) - 1}..-1 (-1: behind the final norm), got {layer}")
        number = len(blocks) + 1 + layer
        if layer == -1:
            self._module = decoder
        else:
            self._module = blocks[number - 1] if number else decoder.get_input_embeddings()
        self._hook = None
        self.states: torch.Tensor | None = None

    def _take(self, module, arguments, output) -> None:
        if hasattr(output, "last_hidden_state"):
            output = output.last_hidden_state
        self.states = output[0] if isinstance(output, tuple) else output

    def __enter__(self) -> StateTap:
        self._hook = self._module.register_forward_hook(self._take)
        return self

    def __exit__(self, *exception) -> None:
        self._hook.remove()
        self.states = None


class Projection:
    """Projects a model's states with a drafter's map.

    Raises IndexFormatError, which names both, for a map that was made with another model, dtype, layer or width.
    """

    def __init__(self, model: PreTrainedModel, state_map: StateMap, origin: StateOrigin) -> None:
        ours = states_of(model, origin.layer)
        if ours[1:] != origin[1:]:
            raise IndexFormatError(f"the dense index was built with states of {origin}, the target is {ours}")
        if state_map.width != state_width(model):
            raise IndexFormatError(
                f"the dense index was built with states of {state_map.width} numbers, the target has {state_width(model)}"
            )
        self.tap = StateTap(model, origin.layer)
        self._matrix = torch.from_numpy(state_map.matrix).to(model.device)
        self._offset = torch.from_numpy(state_map.offset).to(model.device)

    def keys(self, row: int, start: int, entries) -> np.ndarray:
        """float32[n, dimension]: of the latest forward, the states of one sequence at `entries` (a slice or int64[n]), projected.

        row: of the sequence, where each has one; start: its first entry, where all lie in one row (`TargetModel.verify`).
        """
        states = self.tap.states
        states = (states[0, start:] if len(states) == 1 else states[row])[entries].float()
        return torch.nn.functional.normalize(states @ self._matrix.T + self._offset, dim=-1).cpu().numpy()
