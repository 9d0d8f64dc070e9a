"""One package for each table of the docs; none of this is installed with layerwise."""
