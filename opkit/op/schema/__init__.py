"""From the annotations of a function to a schema, patterns of shapes, and codecs of argument types."""
