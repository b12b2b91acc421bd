"""Compares a sampled step of a watch with a plain step of a Llama-8B layer, as `codegen` estimates them.

Nothing here is measured. The plain step is the newest row of `predicted`; the watch measures x, w and dy.
Usage: python benchmarks/predicted_watch.py [--target sm_100] [--tokens 8192]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import common
import predicted

from mxcompile import Watch
from mxcompile.offline import CodegenResult, Work
from mxcompile.offline.estimate import ratio, total

POLICY = "nvidia"
_MEASURES = "mx.cast_statistics.default"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="sm_100")
    parser.add_argument("--tokens", type=int, default=predicted.TOKENS)
    options = parser.parse_args()
    plain = predicted.works(predicted.newest(options.tokens)[options.target, POLICY])
    watch = Watch(lambda record: None)
    result = row(predicted.generated(options.target, POLICY, options.tokens, watch), plain)
    common.show([result])
    common.write("predicted_watch", [{"target": options.target, "tokens": options.tokens, **result}])


def row(sampled: CodegenResult, plain: Sequence[Work]) -> dict[str, Any]:
    """Returns both steps in µs, their ratio, and the launches that measure. plain: work of the plain step."""
    over = ratio(sampled.step.works, plain, sampled.rates)
    measuring = [launch for launch in sampled.launches if _MEASURES in launch.operators]
    return {
        "plain_us": round(total(plain, sampled.rates)),
        "sampled_us": round(sampled.step.us),
        "ratio": round(over.centre, 2),
        "ratio_low": round(over.low, 2),
        "ratio_high": round(over.high, 2),
        "measuring_us": round(sum(launch.estimate.us for launch in measuring if launch.estimate)),
        "measuring_launches": len(measuring),
        "unclear": sampled.step.unclear,
        "spilling": sum(bool(kernel.binary.spill_bytes) for kernel in sampled.kernels),
    }


if __name__ == "__main__":
    main()
