"""One command of `kubedet` a file: `add` declares it, what it needs is imported when it runs."""

import argparse
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Where a command adds its parser."""
