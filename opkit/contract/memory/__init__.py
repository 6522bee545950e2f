"""Memory that tells: guard pages, red zones, poison, and how much of the heap is used."""
