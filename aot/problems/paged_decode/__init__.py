"""Problems of paged decode, one file an implementation."""
