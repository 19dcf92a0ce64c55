"""Exit 0 if the installed package has its core compiled, else 1. A wheel's own test: python dev/is_compiled.py"""

import sys

from preble.core.placing import scheduler

print(scheduler.__file__)
sys.exit(scheduler.__file__.endswith(".py"))
