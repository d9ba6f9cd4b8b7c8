"""`hf-ddtree` in a process of its own, with a checkpoint after every step, for a test to kill."""

import sys
from dataclasses import replace

import hf_ddtree.training.run as run
from hf_ddtree.cli import main

settings_of = run._settings

if __name__ == "__main__":
    run._settings = lambda options: replace(settings_of(options), save_seconds=0.0)
    sys.exit(main())
