"""The helper kernel exists only as a declaration: tests compile it with the fake entry."""
