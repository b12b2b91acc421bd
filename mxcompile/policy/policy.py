"""`Policy`: a preset and rules, and the decision for a layer. `keeping` moves single GEMMs back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from mxcompile.errors import PolicyError, not_allowed
from mxcompile.formats import BLOCK, UNQUANTIZED, Choices, Precision
from mxcompile.policy import schema
from mxcompile.policy.model import Choice, Decision, Gemm, Layer, Match, Preset, Rule, StepRange, Use
from mxcompile.policy.parse import Location, load_yaml, parse_data, read_file
from mxcompile.policy.patterns import literal
from mxcompile.policy.presets import DEFAULT, PRESETS
from mxcompile.policy.reason import Code, Reason
from mxcompile.policy.shadow import Shadows
from mxcompile.policy.values import VERSION
from mxcompile.publish import publish

_NOTHING = Use()


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Selects the GEMMs of each layer to quantize, and their formats.

    Attributes:
        base: preset that decides for layers without a matching rule.
        rules: rules in order; the first that matches a layer decides.
        label: name of the source for messages; ignored by comparisons.

    Examples:
        ```python
        policy = Policy.from_dict({"version": 1, "rules": [{"match": {"name": "*.up_proj"}, "use": "bf16"}]})
        model = torch.compile(model, backend="mxfp8", options={"policy": policy})
        ```
    """

    base: Preset = PRESETS[DEFAULT]
    rules: tuple[Rule, ...] = ()
    label: str = field(default="policy", compare=False)

    @classmethod
    def preset(cls, name: str) -> Policy:
        """Returns the preset `name` as a policy without rules.

        Raises:
            PolicyError: if there is no such preset.
        """
        if name not in PRESETS:
            raise PolicyError(not_allowed("preset", name, PRESETS))
        return cls(base=PRESETS[name], label=f"preset {name}")

    @classmethod
    def load(cls, path: str | Path) -> Policy:
        """Returns the policy in the YAML file `path`.

        Raises:
            PolicyError: with the line of the mistake.
        """
        data, source = load_yaml(read_file(Path(path)), str(path))
        return cls._from_data(data, source)

    @classmethod
    def from_dict(cls, data: dict[str, Any], label: str = "policy") -> Policy:
        """Returns the policy in `data`.

        Args:
            data: a mapping with the keys of the YAML form.
            label: name of the source for messages.

        Raises:
            PolicyError: with the key of the mistake.
        """
        return cls._from_data(data, Location(label))

    @classmethod
    def resolve(cls, value: str | Path | dict[str, Any] | Policy | None) -> Policy:
        """Returns the policy for a value of the option ``policy``.

        Args:
            value: a Policy, a dict, the name of a preset, the path of a file, or None for the default preset.

        Raises:
            PolicyError: for other values, or with the place of a mistake.
        """
        if value is None:
            return cls.preset(DEFAULT)
        if isinstance(value, Policy):
            return value
        if isinstance(value, dict):
            return cls.from_dict(value)
        if isinstance(value, str) and value in PRESETS:
            return cls.preset(value)
        if isinstance(value, str | Path):
            path = Path(value)
            is_file = os.path.isfile(path)  # noqa: PTH113 - False, not an error, for a name that is too long
            if is_file or path.suffix in (".yaml", ".yml"):
                return cls.load(value)
            raise PolicyError(f"{not_allowed('preset', str(value), PRESETS)}; and no such file")
        raise PolicyError(
            f"policy must be a file path, a preset name, a dict or a Policy, found {type(value).__name__}"
        )

    @classmethod
    def _from_data(cls, data: Any, source: Location) -> Policy:
        preset, rules = parse_data(data, source)
        return cls(base=PRESETS[preset], rules=rules, label=source.label)

    def decide(self, layer: Layer) -> Decision:
        """Returns precision, formats and reason for each GEMM of `layer`."""
        index = self.rule_for(layer)
        use = _NOTHING if index is None else self.rules[index].use
        formats = use.over(self.base.formats)
        choices = {gemm.value: self._choose(gemm, use.wants(gemm), layer, index, formats) for gemm in Gemm}
        return Decision.from_choices(choices, use)

    @property
    def quantizes(self) -> bool:
        """Whether the policy can quantize any layer."""
        wishes = (rule.use.wants(gemm) for rule in self.rules for gemm in Gemm)
        return bool(self.base.gemms) or any(wish is not None and wish.quantizes for wish in wishes)

    @property
    def has_steps(self) -> bool:
        """Whether any rule is limited to some training steps."""
        return any(rule.match.steps is not None for rule in self.rules)

    def at(self, step: int) -> Policy:
        """Returns the policy for one training step.

        Rules with ``steps`` match no layer in a policy that was not made for a step.

        Args:
            step: Number of the step, from 0.
        """
        return replace(self, rules=tuple(replace(rule, match=rule.match.at(step)) for rule in self.rules))

    def in_force(self, step: int) -> tuple[bool, ...]:
        """Returns for each rule whether it is in force in training step `step`."""
        ranges = (rule.match.steps for rule in self.rules)  # not `at`: a guard calls this often
        return tuple(steps is None or steps.contains(step) for steps in ranges)

    @property
    def phase(self) -> str:
        """The training steps with the same rules in force as now, or "" without rules with ``steps``."""
        ranges = [steps for rule in self.rules if (steps := rule.match.steps) is not None]
        ends = {end for steps in ranges for end in (steps.start, steps.stop) if end}
        now, starts = [rule.match.in_force for rule in self.rules], sorted({0, *ends})
        same = (
            StepRange(start=start, stop=stop)
            for start, stop in zip(starts, [*starts[1:], None], strict=True)
            if list(self.in_force(start)) == now
        )
        return ", ".join(map(str, same)) if ranges else ""

    @property
    def title(self) -> str:
        """The label, followed by `phase`."""
        return f"{self.label}, {self.phase}" if self.phase else self.label

    def rule_for(self, layer: Layer) -> int | None:
        """Returns the index of the rule that decides for `layer`, or None if the preset decides."""
        for index, rule in enumerate(self.rules):
            if rule.match.fits(layer) and rule.match.missed(layer) is None:
                return index
        return None

    def _choose(
        self, gemm: Gemm, wanted: Precision | None, layer: Layer, index: int | None, formats: Choices
    ) -> Choice:
        sides = (("n", layer.n), ("k", layer.k))
        small = [f"{key}={size}" for key, size in sides if size is not None and size < BLOCK]
        if wanted is not None:
            why = dict(self.rules[index or 0].kept).get(gemm)
            reason = Reason(Code.RULE, (index or 0) + 1) if why is None else Reason(Code.WATCH, why)
        elif not self.base.gemms:
            wanted, reason = UNQUANTIZED, Reason(Code.PRESET, self.base.name)
        elif not layer.role.row.quantized:
            wanted, reason = UNQUANTIZED, Reason(Code.ROLE, layer.role)
        elif gemm not in self.base.gemms:
            wanted, reason = UNQUANTIZED, Reason(Code.PRESET_GEMM, self.base.name, gemm)
        elif small:  # its cast (of a low-rank adapter, a gate per head) costs more time than its GEMM saves
            wanted = UNQUANTIZED
            reason = Reason(Code.SMALL_SIDE, self.base.name, BLOCK, small[0])
        else:
            wanted = self.base.precision
            reason = Reason(Code.PRESET_ROLE, self.base.name, layer.role)
        if wanted.quantizes:
            return Choice(precision=wanted.name, reason=reason, formats=wanted.formats(formats))
        earlier = ((rule, rule.use.wants(gemm)) for rule in self.rules[:index])
        quantizing = (rule for rule, wish in earlier if wish is not None and wish.quantizes)
        rule = next((rule for rule in quantizing if rule.match.fits(layer)), None)
        limit = None if rule is None else rule.match.missed(layer)  # which excludes the layer from the rule
        return Choice(precision=wanted.name, reason=reason if limit is None else Reason(Code.LIMIT, limit))

    def to_dict(self) -> dict[str, Any]:
        """Returns the policy in the form that `from_dict` reads."""
        rules = []
        for rule in self.rules:
            fields = ((key, value, getattr(rule.match, key)) for key, value in schema.MATCH.items())
            match = {key: value.write(entry) for key, value, entry in fields if entry}
            rules.append({"match": match, "use": _use(rule.use)})
        return {"version": VERSION, "preset": self.base.name, "rules": rules}

    def to_yaml(self) -> str:
        """Returns the policy as YAML text that `load` reads back as an equal policy."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=100)

    def dump(self, path: str | Path) -> None:
        """Writes the policy as YAML to `path`, atomically; `load` reads back an equal policy.

        Raises:
            PolicyError: if the file cannot be written.
        """
        try:
            publish(Path(path), self.to_yaml())
        except OSError as error:
            raise PolicyError(f"{path}: cannot be written: {error.strerror}") from None

    def fingerprint(self) -> str:
        """Returns a string that is equal for policies of equal content; it does not depend on `label`."""
        content = [self.to_dict(), self.phase] if self.has_steps else self.to_dict()
        return json.dumps(content, sort_keys=True)


def _use(use: Use) -> dict[str, Any] | str:
    """Returns `use` in its shortest form: one key for three equal precisions, a word if that is all."""
    plain = {
        key: value.write(setting)
        for key, value in schema.USE.items()
        if key != "precision" and (setting := getattr(use, key)) is not None
    }
    if use.fprop is None or not use.fprop == use.dgrad == use.wgrad:
        return plain
    rest = {key: value for key, value in plain.items() if key not in tuple(Gemm)}
    return {"precision": str(use.fprop), **rest} if rest else str(use.fprop)


def keeping(policy: Policy, kept: Mapping[Layer, Mapping[Gemm, str]], label: str) -> Policy:
    """Returns `policy` with some GEMMs not quantized, as a watch does during a run.

    The result first has a rule for each layer of `kept`, which does not change the layer's other GEMMs, then
    the rules of `policy` that can still fire. kept: reasons by layer and GEMM. label: name of the result,
    which can be saved and loaded like any policy.
    """
    shadows = Shadows()
    rules: list[Rule] = []
    for layer, why in kept.items():
        index = None if set(why) == set(Gemm) else policy.rule_for(layer)
        by_gemm: dict[str, Any] = {gemm.value: UNQUANTIZED for gemm in why}
        use = replace(_NOTHING if index is None else policy.rules[index].use, **by_gemm)
        rules.append(Rule(match=Match(name=(literal(layer.name),)), use=use, kept=tuple(why.items())))
        shadows.add(rules[-1].match)
    rules += (rule for rule in policy.rules if not shadows.add(rule.match))
    return replace(policy, rules=tuple(rules), label=label)
