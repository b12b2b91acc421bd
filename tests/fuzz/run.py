"""Draw and check cases; ``--case N`` runs one.

PYTHONPATH=tests python tests/fuzz/run.py --cases 1000 --seed 1
"""

from __future__ import annotations

import argparse
import sys

from checked import check
from drawn import draw


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int)
    options = parser.parse_args()
    if options.case is not None:
        case = draw(options.seed, options.case)
        sys.stdout.write(f"{case}\n")
        check(case)
        return 0
    failed = 0
    for number in range(options.first, options.first + options.cases):
        case = draw(options.seed, number)
        try:
            check(case)
        except Exception as error:
            failed += 1
            sys.stdout.write(f"case {number}: {type(error).__name__}: {str(error)[:400]}\n  {case}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{options.cases} cases of seed {options.seed}, {failed} failed\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
