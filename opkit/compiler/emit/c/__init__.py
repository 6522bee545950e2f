"""The emitter of C: a schedule as translation units."""
