"""`static_cache`: the way to `MXStaticCache`, which takes transformers, without importing it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mxcompile.errors import ModelError, OptionError

if TYPE_CHECKING:
    from mxcompile.serving.cache import MXStaticCache


def static_cache(model: Any, max_cache_len: int) -> MXStaticCache:
    """Make a static cache for a Hugging Face model that stores keys and values in MXFP8.

    It is passed as a `transformers.StaticCache` is: ``model.generate(…, cache=cache)``, before Transformers
    5.24 ``past_key_values=cache``. The first call allocates its memory; then `stored_bytes` is the size.
    Layers that attend over a sliding window or hold other states stay as transformers makes them. `kept`
    names them, and so does a warning.

    Args:
        model: The model, or its configuration.
        max_cache_len: Number of rows, for prompt and new tokens.

    Raises:
        ModelError: No layer can be stored so.
        OptionError: transformers 5 or later is missing, or `max_cache_len` is not positive.
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
