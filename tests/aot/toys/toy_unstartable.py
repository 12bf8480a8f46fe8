"""A compile entry whose compiler cannot be loaded."""

raise ImportError("libtoy.so: cannot open shared object file")
