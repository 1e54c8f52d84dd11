"""A whole training step of D-FINE against transformers' network in a plain loop.

    python -m benchmarks.detr_step                                                          # a CPU
    python -m benchmarks.detr_step --cases 80:640:dfine_s,80:640:dfine_l --images 16 --network graphs

The second is for a GPU. What is measured, and what cases are: see `benchmarks.step`.
"""

import sys

from benchmarks.common import run
from benchmarks.step import compare


def main() -> None:
    """Measure every case and print the ratios."""
    compare("detr_step", __doc__, "80:320:dfine_s,80:320:dfine_l")


if __name__ == "__main__":
    sys.exit(run(main))
