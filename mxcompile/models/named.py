"""Loads the models of the command line: ``package.module:factory`` or a Hugging Face directory.

Nothing is downloaded or unpickled, and no code of a model directory runs: `transformers` must have the
architecture, and weights must be safetensors.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mxcompile.errors import ModelError, MXCompileError, nearest
from mxcompile.models.example_inputs import dummy_inputs
from mxcompile.models.fsdp import floats_to

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Dtypes by their name on the command line."""

ReadWeights = Callable[[Path, torch.dtype], Any]
"""Loads the Hugging Face model of a directory; the dtype applies if the files specify none."""

_FACTORY = "package.module:factory, a function that returns (model, args, kwargs)"
_DIRECTORY = "a directory with a Hugging Face config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model and the arguments of a call, on the meta device if it was loaded without weights.

    name: its name on the command line. made_up: a phrase for the parts with random values, "" for a factory.
    """

    name: str
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    made_up: str = ""


def load_model(
    spec: str,
    read: ReadWeights | None = None,
    *,
    batch: int = 1,
    length: int | None = None,
    dtype: str | None = None,
) -> LoadedModel:
    """Returns the model that `spec` names.

    spec: ``package.module:factory`` (the working directory is importable), or a directory with a config.json,
    with or without the prefix ``hf:``. read: loads safetensors beside the config.json; without such files the
    weights are random. Without `read` the model is on the meta device, for tracing only. batch, length: size
    of the random inputs for a config.json. dtype: key of `DTYPES`. Default: the model's own dtypes.

    Raises `ModelError` if the spec names no model or the factory returns another type, and `CheckpointError`
    for damaged or mismatching weights.
    """
    path = Path(spec.removeprefix("hf:"))
    if spec.startswith("hf:") or path.is_dir() or path.suffix == ".json":
        with _device(read):
            loaded = _from_config(spec, path, read, batch, length)
    elif ":" in spec:
        loaded = _from_factory(spec, read)
    else:
        raise ModelError(f"model {spec!r} is neither {_FACTORY}, nor {_DIRECTORY}{_advice(spec, path)}")
    if dtype is None:
        return loaded
    requested = DTYPES[dtype]
    args, kwargs = floats_to(requested, (loaded.args, loaded.kwargs))
    return replace(loaded, model=loaded.model.to(requested), args=args, kwargs=kwargs)


def factory_of(spec: str) -> Callable[..., Any] | None:
    """Returns the function of a spec ``package.module:factory``, or None for another form.

    Raises `ModelError` if the function does not exist.
    """
    is_factory = ":" in spec and not spec.startswith("hf:") and not Path(spec).exists()
    return _factory(spec) if is_factory else None


def _factory(spec: str) -> Callable[..., Any]:
    """Returns the function that `spec` names, from an installed module or the working directory."""
    module_name, _, attribute = spec.partition(":")
    with _naming(spec):
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.insert(0, here)
        module = importlib.import_module(module_name)
        if not hasattr(module, attribute):
            raise ModelError(f"module {module_name} has no {attribute!r}{nearest(attribute, vars(module))}")
        factory: Callable[..., Any] = getattr(module, attribute)
    return factory


@contextmanager
def _naming(spec: str) -> Iterator[None]:
    """Raises a `ModelError` that names the model for any exception of user code or transformers."""
    try:
        yield
    except MXCompileError:
        raise
    except Exception as error:
        message = " ".join(str(error).split())
        raise ModelError(f"model {spec!r}: {type(error).__name__}: {message}") from error


def _device(read: ReadWeights | None) -> AbstractContextManager[Any]:
    """Creates tensors on the meta device unless `read` loads their values."""
    return torch.device("meta") if read is None else nullcontext()


def _advice(spec: str, path: Path) -> str:
    """Returns advice for common wrong specs: weight files, Python files, names on the hub."""
    if path.suffix == ".py":
        module = path.with_suffix("").as_posix().replace("/", ".")
        return f"; write {module}:NAME for a function in a Python file"
    if path.is_file():
        return f": {path.name} is a file of another kind"
    if spec.count("/") == 1 and not path.exists():
        return (
            "; if it is a name on the Hugging Face hub, download its config.json and name the directory:"
            " nothing is downloaded here"
        )
    beside = [file.parent.name for file in path.absolute().parent.glob("*/config.json")]
    return f"; there is no directory {path}{nearest(path.name, beside)}"


def _from_factory(spec: str, read: ReadWeights | None) -> LoadedModel:
    """Returns the factory's model, on the meta device unless the factory reads values."""
    factory = _factory(spec)
    with _naming(spec):
        try:
            with _device(read):
                result = factory()
        except Exception as error:
            if read is not None or "meta" not in str(error):
                raise
            first_line = str(error).strip().partition("\n")[0]
            print(
                f"{spec} cannot be created without memory for its weights"
                f" ({type(error).__name__}: {first_line}), so it is created with them",
                file=sys.stderr,
            )
            result = factory()
    match result:
        case (nn.Module() as model, tuple() | list() as args, dict() as kwargs):
            return LoadedModel(name=spec, model=model, args=tuple(args), kwargs=kwargs)
    kind = type(result).__name__
    if isinstance(result, tuple):
        kind = f"({', '.join(type(item).__name__ for item in result)})"
    raise ModelError(f"model {spec!r}: the factory returned {kind}, not (model, args, kwargs)")


def _from_config(
    spec: str, path: Path, read: ReadWeights | None, batch: int, length: int | None
) -> LoadedModel:
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        kind, names = raw["model_type"], raw.get("architectures") or []
    except OSError as error:
        raise ModelError(f"model {spec!r}: cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise ModelError(f"model {spec!r}: {file} is not a Hugging Face configuration: {error!r}") from None
    try:
        import transformers
    except ImportError:
        raise ModelError(
            f"model {spec!r}: a config.json needs transformers: pip install transformers"
        ) from None
    has_weights = path.is_dir() and any(path.glob("*.safetensors"))
    with _naming(spec):
        config = configuration({"model_type": kind, **raw})
        owner: Any = model_class(names)
        if owner is None:
            tasks = "ForCausalLM", "ForSeq2SeqLM", ""
            autos = (getattr(transformers, f"AutoModel{task}") for task in tasks)
            owner = next((auto.from_config for auto in autos if type(config) in auto._model_mapping), None)
        if owner is None:
            version = transformers.__version__
            raise ModelError(f"transformers {version} has no model {names or config.model_type!r}")
        config.use_cache = False
        if read is not None and has_weights:
            model = read(path, _dtype(raw)).train()  # the mode of a new model
            model.config.use_cache = False
        else:
            model = owner(config).to(_dtype(raw))
    return LoadedModel(
        name=spec,
        model=model,
        kwargs=dummy_inputs(model, config, batch, length),
        made_up="inputs" if read is not None and has_weights else "weights and inputs",
    )


def configuration(raw: dict[str, Any]) -> Any:
    """Returns the Hugging Face configuration of `raw`, the content of a config.json.

    Transformers writes infinity and NaN, which JSON lacks, as ``{"__float__": "Infinity"}``. Raises
    `ValueError` if it has no such model.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    def number(data: dict[str, Any]) -> Any:
        return float(data["__float__"]) if data.keys() == {"__float__"} else data

    kind = str(raw.get("model_type"))
    if kind not in CONFIG_MAPPING:  # its own message lists all models
        raise ValueError(
            f"transformers {__version__} has no model_type {kind!r}{nearest(kind, CONFIG_MAPPING)}"
        )
    return AutoConfig.for_model(**json.loads(json.dumps(raw), object_hook=number))


def model_class(names: Sequence[object]) -> Any:
    """Returns the first model of Transformers among `names`, the architectures of a config.json, or None."""
    import transformers

    classes = (getattr(transformers, str(name), None) for name in names)
    models = (
        owner
        for owner in classes
        if isinstance(owner, type) and issubclass(owner, transformers.PreTrainedModel)
    )
    return next(models, None)


def _dtype(raw: dict[str, Any]) -> torch.dtype:
    """Returns the dtype of a configuration, FP32 by default."""
    for key in ("dtype", "torch_dtype"):
        name = raw.get(key)
        if isinstance(name, str) and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
    return torch.float32
