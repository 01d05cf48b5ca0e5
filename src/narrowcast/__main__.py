"""`python -m narrowcast` is the console command."""

import sys

from narrowcast_tools.cli import main

sys.exit(main())
