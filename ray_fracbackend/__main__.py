"""``python -m ray_fracbackend`` is ``ray-fracbackend``."""

import sys

from ray_fracbackend.cli import main

sys.exit(main())
