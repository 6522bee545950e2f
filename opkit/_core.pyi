"""The compiled core (``cpp_ext/``). It holds no torch code, so one build serves every torch release."""

def cpu_features() -> dict[str, bool]:
    """Which instruction sets this processor has and its operating system lets a program use, by name."""
