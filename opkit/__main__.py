"""``python -m opkit`` is the ``opkit`` command."""

from opkit.cli import main

main()
