"""What cubinery costs and reaches: `make bench`, `make bench-host` and `make bench-build`.

Nothing here is installed. Figures of one run are compared with figures of the same run alone, because a rate that
was measured on another day, at another clock, says nothing about this one.
"""
