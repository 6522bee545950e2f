"""Results beside the reference's: how near is near enough, and what extreme numbers leave open."""
