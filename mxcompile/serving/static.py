"""`static_cache`: the way to `MXStaticCache`, which takes transformers, without importing it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mxcompile.errors import ModelError, OptionError

if TYPE_CHECKING:
    from mxcompile.serving.cache import MXStaticCache


def static_cache(model: Any, max_cache_len: int) -> MXStaticCache:
    """A static cache for a Hugging Face model whose keys and values are stored in MXFP8.

    model: the model, or its configuration. max_cache_len: rows it has room for, prompt and new tokens. It
    goes where a `transformers.StaticCache` does: ``model.generate(…, past_key_values=cache)``. Its memory is
    allocated by the first call; `stored_bytes` then says how much. Layers that attend over a sliding window
    or hold other states stay as transformers makes them: `kept` says which, and a warning.

    Raises `ModelError` where no layer can be stored so, and `OptionError` without transformers 5 or later.
    """
    try:
        from mxcompile.serving.cache import MXStaticCache
    except ImportError as error:
        raise OptionError(
            f"a static cache needs transformers 5 or later: pip install 'mxcompile[checkpoints]' ({error})"
        ) from None
    config = getattr(model, "config", model)
    if not hasattr(config, "get_text_config"):
        raise ModelError(f"a static cache is for a Hugging Face model, found {type(model).__name__}")
    if max_cache_len < 1:
        raise OptionError(f"max_cache_len is a number of rows, at least 1, found {max_cache_len}")
    return MXStaticCache(config, max_cache_len)
