"""The layout of compressed-tensors, as it is written; `separate` reads it.

    mxfp8-quantized        x (E4M3), x_scale (E8M0 bytes, uint8, [N, K/32])
    mxint8-quantized       x (int8), x_scale as above; mxcompile's own, which compressed-tensors does not have
    mxfp4-pack-quantized   x_packed (bytes of two E2M1), x_scale as above
    nvfp4-pack-quantized   x_packed, x_scale (E4M3, [N, K/16]), x_global_scale (FP32 [1], a divisor)

The config.json has a quantization_config with the format of each module. Formats of activations are not
written, because the policy decides how activations are cast.

Source: compressed_tensors.compressors.mxfp8, .mxfp4 and .nvfp4 (0.20).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mxcompile.checkpoint.weight_entries import MXFP4, MXFP8, MXINT8, NVFP4
from mxcompile.formats import Format

_FORMATS = {
    MXFP8: "mxfp8-quantized",
    MXINT8: "mxint8-quantized",
    MXFP4: "mxfp4-pack-quantized",
    NVFP4: "nvfp4-pack-quantized",
}
"""Names of formats in a config.json."""

_MIXED, _METHOD = "mixed-precision", "compressed-tensors"


def config_entry(ignored: Iterable[str], stored_modules: Mapping[str, Format]) -> dict[str, Any]:
    """Returns the quantization_config of a compressed-tensors checkpoint.

    Args:
        ignored: Modules whose weights are not stored quantized.
        stored_modules: Format of the weights of each other module.
    """
    forms = [form for form in _FORMATS if form in stored_modules.values()] or [MXFP8]
    groups: dict[str, Any] = {}
    for number, form in enumerate(forms):
        of_form = sorted(name for name, stored in stored_modules.items() if stored == form)
        scale_dtype = str(form.scale.dtype)
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(forms) == 1 else of_form,
            "weights": {
                "num_bits": form.elem.bits, "type": "int" if form.elem.is_integer else "float",
                "strategy": "tensor_group" if form.two_level else "group", "group_size": form.tile.along,
                "symmetric": True, "dynamic": False, "scale_dtype": scale_dtype, "zp_dtype": scale_dtype,
            },
            "input_activations": None, "output_activations": None, "format": _FORMATS[form],
        }  # fmt: skip
    return {
        "quant_method": _METHOD,
        "format": _FORMATS[forms[0]] if len(forms) == 1 else _MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(set(ignored)),
    }
