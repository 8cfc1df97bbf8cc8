"""Which of a model's layers keep all of a prompt, a window of it, or a state; from its config."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lmcache_xpu.errors import SettingsError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OTHER_WAYS = "Leave layerwise off, or use --no-offload (plain vLLM)."

# transformers makes its names when they are asked for. Of two threads that ask first at once, one
# may be told that there is no such name.
_IMPORTING = threading.Lock()

_WHOLE = {"full_attention", "attention"}
_WINDOW = {"sliding_attention", "chunked_attention"}
_BOTH = {"hybrid", "hybrid_sliding"}  # a state beside a KV cache
_NOTHING = {"mlp", "moe"}
_STATE = {*_BOTH, "conv", "linear_attention", "mamba", "mamba2", "recurrent"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKinds:
    """Numbers of a language model's layers by kind; all 0 if its configuration names no kinds."""

    whole: int = 0  # attend to the whole prompt
    window: int = 0  # attend to the last tokens, or to those of the same stretch
    other: tuple[str, ...] = ()  # transformers' names of the other kinds

    @classmethod
    def of_config(cls, config: PretrainedConfig) -> Self:
        """From the configuration of a language model."""
        kinds: list[str] = []
        for name in ("layer_types", "layers_block_type"):
            kinds = kinds or list(getattr(config, name, None) or ())
        window = getattr(config, "sliding_window", None)
        if not kinds and window and getattr(config, "use_sliding_window", True):
            kinds = ["sliding_attention"] * config.num_hidden_layers
        return cls(
            whole=sum(kind in _WHOLE for kind in kinds),
            window=sum(kind in _WINDOW for kind in kinds),
            other=tuple(sorted(set(kinds) - _WHOLE - _WINDOW)),
        )

    @property
    def states(self) -> bool:
        """Whether some layers keep a state."""
        return not _STATE.isdisjoint(self.other)

    @property
    def names(self) -> tuple[str, ...]:
        """The kinds that do not attend to the whole prompt."""
        return (*self.other, *(["attention to a window"] if self.window else []))

    @property
    def attention(self) -> bool:
        """Whether some layers keep keys and values."""
        return bool(self.whole or self.window or set(self.other) & _BOTH)

    @property
    def strange(self) -> tuple[str, ...]:
        """The kinds that are not known here."""
        return tuple(kind for kind in self.other if kind not in _STATE | _NOTHING)


def read_config(model: str, *, cached: bool = False) -> PretrainedConfig:
    """Return the configuration of the language model in a directory, a config.json, or on a hub.

    With `cached` no hub is asked. Raises SettingsError if there is none that transformers can read.
    """
    with _IMPORTING:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig

    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        if path.is_file():
            values: dict[str, Any] = json.loads(path.read_text(), object_hook=_floats)
            config = AutoConfig.for_model(values.pop("model_type"), **values)
        else:
            config = AutoConfig.from_pretrained(model, local_files_only=cached)
        return config.get_text_config()
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        said = " ".join(map(str.strip, str(error).splitlines()[:2]))[:200]
        raise SettingsError(
            f"no configuration that transformers can read for model={model} "
            f"({type(error).__name__}: {said})",
            "a model directory, a config.json, or the name of a model on a hub",
        ) from error


def _floats(value: dict[str, Any]) -> Any:
    """Read numbers that JSON lacks, as transformers writes them: {"__float__": "Infinity"}."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value
