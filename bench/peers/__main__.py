"""python -m bench.peers: see --help."""

import sys

from bench.peers import main

sys.exit(main(sys.argv[1:]))
