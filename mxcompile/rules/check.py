"""Complaints about a policy on a model: rules and patterns without effect, and near misses.

A typo in a pattern would otherwise go unnoticed, and so would a layer that stays in BF16 because a size is
just below a limit.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import logging
import re
from collections.abc import Iterable, Sequence

from mxcompile.errors import PolicyError, UnsupportedError
from mxcompile.policy import ATTENTION_PRODUCTS, Layer, Limit, Match, Policy
from mxcompile.policy.parse import rule_words
from mxcompile.policy.patterns import searching
from mxcompile.report import GemmRecord
from mxcompile.rules.fit import RuleFit, deciding_rule, fits
from mxcompile.rules.layers import layers_of, spelled

log = logging.getLogger("mxcompile.rules")


def unused_rules(policy: Policy, gemms: Iterable[GemmRecord]) -> list[str]:
    """Returns a sentence for every rule of `policy` that cannot decide for any of `gemms`.

    The rule matches no layer (the sentence suggests a correction), or it is limited to other training steps.
    """
    layers = layers_of(gemms)
    unused = [_unused(policy, fit, layers) for fit in fits(policy, layers) if fit.unused]
    return unused + _of_other_steps(policy)


def mistakes(policy: Policy, layers: Sequence[Layer]) -> list[str]:
    """Returns a sentence for everything in `policy` that has no effect on `layers`.

    Covers rules that match no layer, rules whose layers all go to earlier rules, and patterns in a list with
    a misspelt word.
    """
    sentences: list[str] = []
    names = list(dict.fromkeys(layer.name for layer in layers))
    for fit in fits(policy, layers):
        if fit.unused:
            sentences.append(_unused(policy, fit, layers))
            continue
        if not fit.decides and fit.rule.match.in_force:
            by = {index + 1 for x in fit.taken if (index := deciding_rule(policy, x)) is not None}
            if any(policy.rules[number - 1].match.steps for number in by):
                continue  # the rule decides in other steps
            sentences.append(
                f"{policy.label}: rule {fit.number} decides nothing: {spelled(fit.taken)} went to"
                f" {rule_words(sorted(by))}; move it up"
            )
        for pattern in fit.rule.match.name:  # of a list, whose other patterns may match
            is_idle = not any(Match(name=(pattern,)).names(name) for name in names)
            if is_idle and (guess := respelled(pattern, names)) is not None:
                sentences.append(
                    f"{policy.label}: rule {fit.number}: {pattern!r} matched no layer"
                    f" (did you mean {guess!r}?)"
                )
    return sentences


def near_misses(policy: Policy, layers: Sequence[Layer]) -> list[str]:
    """Returns a sentence per rule and limit for layers within 10 % of the limit.

    A layer counts only if the rule would change the decision of the preset.
    """
    return [
        f"{policy.label}: rule {fit.number}: {missed}, just {'over' if limit.upper else 'under'}, and no"
        f" other rule decides; {'raise' if limit.upper else 'lower'} the limit or add a rule"
        for fit in fits(policy, layers)
        if not fit.unused
        for limit, missed in _missed(fit, fit.near)
    ]


def complaints(policy: Policy, layers: Sequence[Layer]) -> list[str]:
    """Returns `mistakes` and `near_misses`, which strict mode raises."""
    return mistakes(policy, layers) + near_misses(policy, layers)


def check_layers(policy: Policy, layers: Sequence[Layer], *, strict: bool) -> None:
    """Logs all `complaints` as warnings, or raises one `PolicyError` with all of them if `strict`."""
    _say(complaints(policy, layers), strict)


def check_mistakes(
    policy: Policy, gemms: Iterable[GemmRecord], *, strict: bool, tables: Sequence[Layer] = ()
) -> None:
    """Logs near misses and rules for other steps; logs `mistakes`, or raises a `PolicyError` if `strict`.

    Analyses and serving call this instead of `check_layers`: a near miss does not make their result wrong.
    tables: embeddings that rules may store quantized.
    """
    layers = layers_of(gemms)
    _say(near_misses(policy, layers) + _of_other_steps(policy), strict=False)
    _say(mistakes(policy, [*layers, *tables]), strict)


def with_complaints(error: UnsupportedError, policy: Policy, layers: Sequence[Layer]) -> UnsupportedError:
    """Returns `error` about unsupported layers, extended by the `complaints` about `layers`."""
    return UnsupportedError("\n".join([str(error), *complaints(policy, layers)]))


def _say(sentences: list[str], strict: bool) -> None:
    if sentences and strict:
        raise PolicyError("\n".join(sentences))
    for sentence in sentences:
        log.warning("%s", sentence)


def _of_other_steps(policy: Policy) -> list[str]:
    """Returns a sentence for every rule of `policy` whose training steps exclude the present step."""
    return [
        f"{policy.label}: rule {number} decides nothing here: it is limited to {rule.match.steps} of training"
        for number, rule in enumerate(policy.rules, 1)
        if not rule.match.in_force
    ]


def _unused(policy: Policy, fit: RuleFit, layers: Sequence[Layer]) -> str:
    sentence = f"{policy.label}: rule {fit.number} matched no layer"
    if fit.missed:
        return f"{sentence}: {'; '.join(missed for _, missed in _missed(fit, fit.missed))}"
    return sentence + _suggestion(fit.rule.match, [x for x in layers if x.role not in ATTENTION_PRODUCTS])


def _suggestion(match: Match, layers: Sequence[Layer]) -> str:
    """Returns the suggestion for a rule without matches: a layer of that name, or the nearest names."""
    if match.blocks is not None:
        if not any(layer.block for layer in layers):
            return ": the model has no repeated blocks (members of a module list); give names"
        elsewhere = [x for x in layers if dataclasses.replace(match, blocks=None).fits(x)]
        if elsewhere:
            return f": other matches are in other blocks or in none ({spelled(elsewhere)})"
    if not match.name:
        return ""
    for layer in layers:
        if match.names(layer.name):
            return f": {layer.name} has role {layer.role} and class {layer.module}"
    names = list(dict.fromkeys(layer.name for layer in layers))
    return ": " + ", ".join(f"{pattern!r}{meant(pattern, names)}" for pattern in match.name)


def _missed(fit: RuleFit, layers: Iterable[Layer]) -> list[tuple[Limit, str]]:
    """Returns (limit, ``x and y below min_k 256 (k=248)``) for every limit that excludes some of `layers`."""
    by_limit: dict[Limit, list[Layer]] = {}
    for layer in layers:
        limit = fit.rule.match.missed(layer)
        assert limit is not None
        by_limit.setdefault(limit, []).append(layer)
    return [
        (limit, f"{spelled(missing)} {'above' if limit.upper else 'below'} {limit}")
        for limit, missing in by_limit.items()
    ]


_TOKEN = re.compile(r"\[!?\]?[^\]]*\]|[^\W_]+|.", re.DOTALL)
_WORD = re.compile(r"[^\W_]+")
_NEAR = 0.65
"""Least similarity (difflib's ratio) of two words that counts as a typo."""


def meant(pattern: str, names: Sequence[str]) -> str:
    """Returns ``" (did you mean 'x'?)"`` with the best guess among `names`, or an empty string."""
    expression, guess = pattern.removeprefix("re:"), respelled(pattern, names)
    is_glob = expression == pattern
    if guess is None:
        compiled = re.compile(fnmatch.translate(pattern) if is_glob else expression, re.IGNORECASE)
        guess = next((name for name in names if compiled.fullmatch(name)), None)
    if guess is None and is_glob:
        wider = (f"*{pattern}", f"{pattern}*", f"*{pattern}*")
        guess = next((glob for glob in wider if fnmatch.filter(names, glob)), None)
    elif guess is None and any(re.search(expression, name) for name in names):
        guess = searching(expression)
    if guess is None:
        guess = next(iter(difflib.get_close_matches(pattern, dict.fromkeys(names), n=1, cutoff=0.6)), None)
    return "" if guess is None else f" (did you mean {guess!r}?)"


def respelled(pattern: str, names: Sequence[str]) -> str | None:
    """Returns a glob that matches a name and differs from `pattern` in one word, or None."""
    if pattern.startswith("re:"):
        return None
    words = dict.fromkeys(word for name in names for word in _WORD.findall(name))
    tokens = _TOKEN.findall(pattern)
    for index, token in enumerate(tokens):
        for word in difflib.get_close_matches(token, words, cutoff=_NEAR) if _WORD.match(token) else ():
            guess = "".join([*tokens[:index], word, *tokens[index + 1 :]])
            if fnmatch.filter(names, guess):
                return guess
    return None
