"""Opening a target model and its tokenizer from whatever names them: a folder, a GGUF file, a name on the hub."""

from __future__ import annotations

from pathlib import Path

import torch

from redraft.retrieval.errors import import_extra

__all__ = ["DTYPES", "load_model", "locate_model"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(spec: str | Path, *, dtype: str = "auto", device: str = "auto"):
    """Return (model, tokenizer), the model in evaluation mode on `device`.

    `spec` is a transformers folder, a folder with one GGUF file, a `.gguf` file, or a name on the hub. `device` "auto"
    is the first CUDA device, else the CPU; `dtype` "auto" is bfloat16 on CUDA and float32 on the CPU. Raises
    FileNotFoundError for a path that is not there, ValueError for a folder that holds no model.
    """
    transformers = import_extra("transformers", "models")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    where, gguf = locate_model(spec)
    extra = {}
    if gguf is not None:
        import_extra("gguf", "models")
        extra["gguf_file"] = gguf
    tokenizer = transformers.AutoTokenizer.from_pretrained(where, **extra)
    model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=DTYPES[dtype], **extra)
    return model.to(device).eval(), tokenizer


def locate_model(spec: str | Path) -> tuple[str, str | None]:
    """(what transformers is to open, the name of the GGUF file in it or None), for a `spec` as `load_model` takes it."""
    path = Path(spec).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"model {str(spec)!r}: wanted a folder, a .gguf file or a name on the hub")
        return str(path.parent), path.name
    if path.is_dir():
        if (path / "config.json").is_file():
            return str(path), None
        files = sorted(file.name for file in path.glob("*.gguf"))
        if len(files) != 1:
            raise ValueError(
                f"model {str(spec)!r}: wanted a config.json or one .gguf file there, got {files or 'neither'}"
            )
        return str(path), files[0]
    if str(spec).startswith((".", "/", "~")) or str(spec).endswith(".gguf") or str(spec).count("/") > 1:
        raise FileNotFoundError(f"model {str(spec)!r}: no such file or folder")
    return str(spec), None
