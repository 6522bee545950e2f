"""Stands in the source tree for the compiled part of an installed opkit, and says so. It is in no wheel."""

raise ImportError(
    "This opkit is a source tree, without opkit._core, which is compiled when opkit is installed. Run `pip install .` in it. "
    "If you did, Python takes the source tree because it is the current folder: start it in another folder, or with -P."
)
