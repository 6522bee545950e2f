"""Memory that reveals wrong accesses: guard pages, red zones, poisoned memory, and the size of the heap."""
