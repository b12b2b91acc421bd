"""`static_cache`: creates an `MXStaticCache`; this module does not need transformers at import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mxcompile.errors import ModelError, OptionError, check_word
from mxcompile.formats import PRECISIONS, Choices

if TYPE_CHECKING:
    from mxcompile.serving.cache import MXStaticCache


def static_cache(model: Any, max_cache_len: int, *, precision: str = "mxfp8") -> MXStaticCache:
    """Creates a static cache for a Hugging Face model that stores keys and values in MXFP8 or MXINT8.

    It is used like a `transformers.StaticCache`: ``model.generate(…, cache=cache)``, before Transformers 5.24
    ``past_key_values=cache``. The first call allocates its memory; afterwards `stored_bytes` is its size.
    Layers with a sliding window or other states stay as transformers creates them; `kept` and a warning list
    them.

    Args:
        model: The model, or its configuration.
        max_cache_len: Number of rows, for prompt and new tokens.
        precision: ``mxfp8``, or ``mxint8`` for less error in as many bytes.

    Returns:
        The cache.

    Raises:
        ModelError: No layer can be stored in `precision`, or `model` is not a Hugging Face model.
        OptionError: transformers 5 or later is missing, `max_cache_len` is not positive, or
            `precision` is not a format for keys and values.

    Examples:
        >>> cache = mxcompile.static_cache(model, max_cache_len=4096)
        >>> model.generate(**inputs, cache=cache)
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
        raise OptionError(f"max_cache_len must be a number of rows of at least 1, found {max_cache_len}")
    forms = {row.name: row.formats(Choices()).x for row in PRECISIONS.values() if row.quantizes}
    stored = {name: form for name, form in forms.items() if form.lies_stored}
    check_word("precision", precision, stored)
    return MXStaticCache(config, max_cache_len, form=stored[precision])
