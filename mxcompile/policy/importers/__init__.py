"""Policies made from other tools' configurations, with the settings that a policy cannot express."""

from __future__ import annotations

from pathlib import Path

from mxcompile.errors import PolicyError, not_allowed
from mxcompile.policy.importers import llm_compressor, recipes, torchao, transformer_engine
from mxcompile.policy.importers.draft import Draft, Imported, Setting, read

FORMATS = {module.NAME: module for module in (transformer_engine, llm_compressor, torchao, recipes)}
"""Importers by name: modules with `recognises`, `TOOL`, `PRESET` and `convert`."""

__all__ = ["FORMATS", "Imported", "import_policy"]


def import_policy(path: str | Path, format: str | None = None) -> Imported:  # noqa: A002 - as on the command line
    """Returns the policy in the configuration file `path` of another tool.

    format: "te" (Transformer Engine debug YAML), "llm-compressor" (a recipe, or the config.json of a
    compressed model), "torchao" (an FqnToConfig as JSON or YAML) or "recipe" (an FP8 recipe's name and
    fields); None detects the format from the content.

    Raises `PolicyError` if the file cannot be read, is in none of these formats, or is invalid.
    """
    if format is not None and format not in FORMATS:
        raise PolicyError(not_allowed("format", format, FORMATS))
    data, source = read(Path(path))
    if format is None and isinstance(data, dict):
        format = next((name for name, module in FORMATS.items() if module.recognises(data)), None)  # noqa: A001
    if format is None:
        raise source.error(
            f"neither of {', '.join(FORMATS)}: name the tool with --from if it is one, or check the file"
        )
    module = FORMATS[format]
    draft = Draft(preset=module.PRESET)
    module.convert(data, Setting(source.label, source.lines, draft=draft))
    return draft.finish(source.label, module.TOOL)
