"""From loop nests to C: ``source`` writes the unit, ``flags`` says how it is compiled, ``functions`` is what it calls."""
